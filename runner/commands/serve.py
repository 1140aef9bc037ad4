"""``kvtier serve``: its options, and the way from them to a running server."""

from __future__ import annotations

import argparse
import json
import logging.config
import os
import socket
import sys
from importlib.util import find_spec
from typing import Any

from runner.commands import access_arguments, checks, foreign_flags
from runner.commands.arguments import above_zero, positive, quiet_transformers
from runner.display.units import size

SECRET_VARIABLE = "KVTIER_KEY_SECRET"
SWITCH_S = 0.0005
"""How long the engine's thread waits at most for the interpreter while others write answers; a step asks for it some
hundred times."""


class _Former(argparse.Action):
    """Refuses an option that has another name now."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        parser.error(f"{self.option_strings[0]} is called {self.option_strings[0].replace('store', 'remote')}")


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API does",
        description="Serves /v1/completions, /v1/chat/completions and what belongs to them, with streams. Without a "
        "model it serves the bundled tiny one. Names are vLLM's where the meaning is the same.",
        epilog="SIGTERM or Ctrl-C: /ready says 503, new requests are sent away, running ones have --drain-timeout "
        "seconds, and the process has ended 5 s later. A second one stops at once. Status 1 if the engine has died, "
        "else 0.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    serve.add_argument("model", nargs="?", help="a folder, GGUF file or hub id of a causal LM; none: the bundled model")
    _add_http(serve)
    _add_queue(serve)
    _add_engine(serve)
    foreign_flags.add_to(serve)
    serve.set_defaults(run=run)


def _add_http(serve: argparse.ArgumentParser) -> None:
    http = serve.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0 is all of this machine")
    http.add_argument("--port", type=_port, default=8000, help="0 takes a free one")
    http.add_argument("--served-model-name", nargs="+", help="what clients call the model (default: its own name)")
    access_arguments.add_to(http)
    http.add_argument("--disable-page", action="store_true", help="no live page at /, and no /watch")
    http.add_argument("--ssl-certfile", help="serve HTTPS with this certificate")
    http.add_argument("--ssl-keyfile", help="and this key")
    http.add_argument("--max-body-bytes", type=positive, default=8 * 2**20, help="of a request; more is 413")
    http.add_argument(
        "--max-connections",
        type=positive,
        default=4096,
        help="open at once; beyond that a new one closes one that asks nothing",
    )
    http.add_argument("--read-timeout", type=above_zero, default=30.0, help="seconds for a request's head, and for "
                      "each MiB of its body; also how long a stream may be left unread")  # fmt: skip
    http.add_argument("--drain-timeout", type=above_zero, default=30.0, help="seconds that requests have once it stops")
    http.add_argument(
        "--uvicorn-log-level",
        default="info",
        choices=["critical", "error", "warning", "info", "debug", "trace"],
        help="of the web server's own lines",
    )
    http.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line per request")
    http.add_argument("--disable-log-stats", action="store_true", help="no line of throughput every ten seconds")
    http.add_argument(
        "--exit-on-engine-death",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end, with status 1, once the engine has died; else answer 503 until told to end",
    )
    http.add_argument("--otlp-traces-endpoint", help="send spans of requests to this OpenTelemetry collector, such as "
                      "http://127.0.0.1:4318/v1/traces (protobuf over HTTP)")  # fmt: skip


def _add_queue(serve: argparse.ArgumentParser) -> None:
    queue = serve.add_argument_group("queue")
    queue.add_argument("--max-waiting-requests", type=positive, default=1024, help="without a first token; more is 429")
    queue.add_argument(
        "--max-waiting-tokens", type=positive, default=4 * 2**20, help="of prompts that wait; more is 429"
    )


def _add_engine(serve: argparse.ArgumentParser) -> None:
    engine = serve.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=positive, help="tokens of a prompt and its answer (default: as many "
                        "as model and pools allow)")  # fmt: skip
    engine.add_argument("--chat-template", help="a file with the template to use for chats (default: the model's own)")
    engine.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    engine.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    engine.add_argument("--kv-cache-dtype", help="of K and V: fp8, or any that --dtype takes (default: the weights')")
    engine.add_argument("--kv-scales", help="scales for fp8: a .json file of `kvtier calibrate` or a .safetensors file")
    engine.add_argument("--device-memory", help="for KV on the device, such as 8GiB (default: a share of what is free)")
    engine.add_argument("--host-memory", help="for the tier in host memory, such as 64GiB; 0 turns it off (default: a "
                        "share of what is free)")  # fmt: skip
    engine.add_argument(
        "--kv-remote",
        metavar="URI",
        help="a remote tier, which engines share and restarts survive, such as file:///var/kv, "
        "s3://bucket/prefix or mooncake://host:port",
    )
    for former in ("--kv-store", "--kv-store-secret-file"):
        engine.add_argument(former, action=_Former, help=argparse.SUPPRESS)
    engine.add_argument("--kv-remote-secret-file", metavar="FILE", help=f"the secret that names its content, the same "
                        f"for all engines that share it; {SECRET_VARIABLE} may hold it instead")  # fmt: skip
    engine.add_argument("--block-size", type=positive, default=16, help="tokens per block")
    engine.add_argument("--max-num-batched-tokens", type=positive, help="computed in a step, at most; default: "
                        "8192, on a CPU 2048")  # fmt: skip
    engine.add_argument("--max-num-seqs", type=positive, default=256, help="requests that run at once, at most")
    engine.add_argument("--grammar-compile-limit", type=above_zero, default=10.0, help="CPU seconds that compiling one "
                        "grammar or JSON schema may take; more is 400")  # fmt: skip
    engine.add_argument("--attention", default="auto", help="auto, flashinfer or reference")
    engine.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    engine.add_argument("--batch-invariant", action="store_true", help="answers do not depend on who "
                        "shares the batch (FlashInfer)")  # fmt: skip
    engine.add_argument("--exact", action="store_true", help="no bit of an answer depends on hits, chunks or who "
                        "shares the batch (on a CPU)")  # fmt: skip
    engine.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="tell routers what is cached (docs/ROUTING.md); vLLM's fields: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
    )
    engine.add_argument("--verify", choices=["full"], help="check every block that comes back from host memory")


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    settings, options = _check(args)
    from runner.server.sockets import bind, raise_file_limit

    try:
        sock = bind(args.host, args.port)
    except OSError as problem:
        from kvtier.machine.errors import ConfigError

        raise ConfigError(f"cannot listen on {args.host}:{args.port} ({problem.strerror or problem})") from problem
    raise_file_limit(args.max_connections)
    sys.setswitchinterval(SWITCH_S)
    with sock:
        return _serve(args, sock, settings, options)


def _check(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server and what the engine are told, checked as far as that takes no long import."""
    from kvtier.machine.errors import ConfigError

    _check_packages(args)
    checks.check_engine(args)
    if not all(getattr(args, "served_model_name", ["needle"])):
        raise ConfigError("--served-model-name: a served name is empty")
    checks.check_certificate(getattr(args, "ssl_certfile", None), getattr(args, "ssl_keyfile", None))
    settings = access_arguments.read(args)
    settings["template"] = _template(getattr(args, "chat_template", None))
    return settings, _engine_options(args)


def _serve(args: argparse.Namespace, sock: socket.socket, settings: dict[str, Any], options: dict[str, Any]) -> int:
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("Importing torch and transformers"):
        from runner import AsyncLLM, needle
        from runner.server import logs
        from runner.server.app import create_app
        from runner.server.deadline import GRACE_S, Deadline
        from runner.server.lifecycle import Server

        quiet_transformers()
    model, template = getattr(args, "model", None), settings.pop("template")
    names = getattr(args, "served_model_name", ["needle" if model is None else str(model)])
    logging.config.dictConfig(logs.options())
    with console.status("Loading the model"):
        llm = AsyncLLM(needle.weights_path() if model is None else model, **options)
    deadline = Deadline(status=lambda: 0 if llm.death is None else 1)
    try:
        _use_template(llm, template)
        app = create_app(llm, _settings(args, settings, names, llm.inputs.max_tokens))
        banner = _banner(args, bool(settings["api_keys"]), llm, names, sock.getsockname())
        server = Server(
            app,
            on_start=lambda: console.print(banner, highlight=False, soft_wrap=True),
            deadline=deadline,
            log_level=args.uvicorn_log_level,
            access_log=not hasattr(args, "disable_uvicorn_access_log"),
            ssl_certfile=getattr(args, "ssl_certfile", None),
            ssl_keyfile=getattr(args, "ssl_keyfile", None),
        )
        try:
            server.run(sockets=[sock])
        finally:
            app.state.served.close()
        return 0 if llm.is_running else 1
    finally:
        llm.close()
        deadline.within(GRACE_S)


def _check_packages(args: argparse.Namespace) -> None:
    """Raises ``MissingPackage``."""
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            from runner.errors import MissingPackage

            raise MissingPackage(f"kvtier serve needs {name}; pip install 'kvtier[serve]'")
    if hasattr(args, "otlp_traces_endpoint"):
        from runner.metrics.tracing import check_installed

        check_installed()


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = foreign_flags.OPTIONS.items()
    found = {ours: getattr(args, theirs) for theirs, ours in names if hasattr(args, theirs)}
    found |= _remote_options(args)
    return found | {"cuda_graphs": not hasattr(args, "enforce_eager")}


def _remote_options(args: argparse.Namespace) -> dict[str, Any]:
    from kvtier.geometry.sizing import parse_bytes
    from kvtier.machine.errors import ConfigError
    from kvtier.remote.backends.uri import check_packages, parse_uri

    file = getattr(args, "kv_remote_secret_file", None)
    if not hasattr(args, "kv_remote"):
        if file is not None:
            raise ConfigError("--kv-remote-secret-file is for a remote: give --kv-remote as well")
        return {}
    if hasattr(args, "host_memory") and not parse_bytes(args.host_memory, "--host-memory"):
        raise ConfigError("--kv-remote needs a host tier, which --host-memory 0 turns off: blocks come from the remote "
                          "into it")  # fmt: skip
    check_packages(parse_uri(args.kv_remote))
    return {"remote_uri": args.kv_remote, "key_secret": _secret(file)}


def _secret(file: str | None) -> bytes:
    from kvtier.machine.errors import ConfigError

    if file is None:
        found = os.environb.get(SECRET_VARIABLE.encode(), b"").strip()  # bytes of any kind
        missing = f"--kv-remote needs a secret: --kv-remote-secret-file, or {SECRET_VARIABLE} in the environment"
    else:
        found = checks.read_file("--kv-remote-secret-file", file).strip()
        missing = f"--kv-remote-secret-file {file} is empty"
    if not found:
        raise ConfigError(missing)
    return found


def _settings(args: argparse.Namespace, access: dict[str, Any], names: list[str], model_limit: int | None) -> Any:
    from kvtier import ConfigError
    from runner.server.settings import Settings

    most = getattr(args, "max_model_len", None)
    if most is not None and model_limit is not None and most > model_limit:
        raise ConfigError(f"--max-model-len {most:,}: this model was made for {model_limit:,} tokens")
    return Settings(
        names=tuple(names),
        **access,
        page=not hasattr(args, "disable_page"),
        max_model_len=most,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        read_timeout_s=args.read_timeout,
        drain_timeout_s=args.drain_timeout,
        traces_endpoint=getattr(args, "otlp_traces_endpoint", ""),
        exit_on_engine_death=args.exit_on_engine_death,
        log_stats=not hasattr(args, "disable_log_stats"),
    )


def _template(path: str | None) -> str | None:
    from kvtier.machine.errors import ConfigError

    if path is None:
        return None
    try:
        return checks.read_file("--chat-template", path).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"--chat-template {path}: {problem}") from problem


def _use_template(llm: Any, template: str | None) -> None:
    from kvtier.machine.errors import ConfigError

    if template is None:
        return
    if llm.tokenizer is None:
        raise ConfigError("--chat-template: this model has no tokenizer")
    llm.tokenizer.chat_template = template


def _banner(args: argparse.Namespace, needs_key: bool, llm: Any, names: list[str], address: Any) -> str:
    """What is served, where, with how much room, and a line to try it."""
    stats = llm.cache.stats()
    host, port = ("127.0.0.1" if address[0] == "0.0.0.0" else address[0]), address[1]
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if hasattr(args, "ssl_certfile") else "http"
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    ask = {"model": names[0], "prompt": "<bos> page section S1 key K17 = 4 7 1 9 3 . ask K17 ? ->", "temperature": 0}
    if hasattr(args, "model"):
        ask["prompt"] = "The capital of France is"
    told = "" if llm.kv_events is None else f"\nKV events, token ids and all, to whoever asks {llm.kv_events.endpoint}"
    if llm.cache.has_remote:
        told = f"\nstore {args.kv_remote}, namespace {llm.cache.remote_namespace}{told}"
    told = f"{_memory(args, stats)}{told}"
    return "\n".join(
        [
            f"kvtier serves {getattr(args, 'model', 'the bundled model')} as {', '.join(names)} at "
            f"{scheme}://{host}:{port}/v1",
            f"on {llm.model.device}: attention by {llm.model.attention.name}; "
            f"{'API keys' if key else 'no API key is asked for'}{told}",
            f"curl {scheme}://{host}:{port}/v1/completions -H 'Content-Type: application/json'{key} "
            f"-d '{json.dumps(ask)}'",
        ]
    )


def _memory(args: argparse.Namespace, stats: Any) -> str:
    """What K and V may take, and for how many tokens that is; with the option that changes it, where none was given."""
    rows = [("device", stats.device_bytes, f"contexts of {stats.device_capacity_tokens:,} tokens")]
    if stats.host_bytes:
        rows.append(("host", stats.host_bytes, f"a host tier of {stats.host_capacity_tokens:,} tokens"))
    told = ""
    for tier, taken, what in rows:
        given = f"--{tier}-memory" if hasattr(args, f"{tier}_memory") else f"--{tier}-memory sets it"
        told += f"\n{size(taken)} of {tier} memory ({given}): {what}"
    return told if stats.host_bytes else f"{told}\nno host tier"


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)
