"""The options of ``kvtier bench serve``."""

from __future__ import annotations

import argparse
from dataclasses import fields

from runner.bench.names import LATENCIES, History, PromptForm, Shape, TraceFormat, WorkloadName
from runner.commands.arguments import above_zero, json_object, not_negative, positive

KEY_VARIABLE = "OPENAI_API_KEY"


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default if there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ([], {}):
            return action.help
        return super()._get_help_string(action)


def add_serve(serve: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    _add_server(serve)
    _add_workload(serve)
    _add_sizes(serve)
    _add_trace(serve)
    _add_requests(serve)
    _add_load(serve)
    _add_result(serve)


def _add_server(serve: argparse.ArgumentParser) -> None:
    server = serve.add_argument_group("server")
    server.add_argument("--base-url", help="such as https://host:8000 (default: http://HOST:PORT); with "
                        "user:password@ before the host these are sent, and are in no report")  # fmt: skip
    server.add_argument("--host", default="127.0.0.1", help="of the server")
    server.add_argument("--port", type=positive, default=8000, help="of the server")
    server.add_argument("--endpoint", default="/v1/completions", help="what requests are sent to")
    server.add_argument("--model", help="the name that the server knows (default: its first)")
    server.add_argument("--api-key", help=f"sent as a bearer token; {KEY_VARIABLE} may hold it instead, where other "
                        "users of this machine do not see it")  # fmt: skip
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="further headers of each request")
    server.add_argument("--ssl-ca-certs", help="a file of certificates to trust instead of the system's")
    server.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    server.add_argument("--timeout", type=above_zero, default=3600.0, help="seconds that a request may take in all, "
                        "from its connection to the last byte of its answer")  # fmt: skip
    server.add_argument("--connect-timeout", type=above_zero, default=30.0, help="seconds that a connection may take")
    server.add_argument("--ready-check-timeout-sec", type=not_negative, default=0.0, help="seconds to wait for a "
                        "server that does not answer yet")  # fmt: skip


def _add_workload(serve: argparse.ArgumentParser) -> None:
    work = serve.add_argument_group("workload")
    work.add_argument("--dataset-name", choices=[one.value for one in WorkloadName],
                      help="what is asked (default: random, or timed_trace with --trace)")  # fmt: skip
    work.add_argument("--seed", type=_whole, default=0, help="of lengths, tokens, order, arrivals and think times")


def _add_sizes(serve: argparse.ArgumentParser) -> None:
    sizes = serve.add_argument_group("sizes of the workloads")
    for field in fields(Shape):
        kind = _whole if field.type == "int" else not_negative
        flag = f"--{field.name.replace('_', '-')}"
        sizes.add_argument(flag, type=kind, default=field.default, metavar="N", help=SIZES[field.name])


def _add_trace(serve: argparse.ArgumentParser) -> None:
    trace = serve.add_argument_group("traces")
    trace.add_argument("--trace", "--dataset-path", metavar="PATH", help="a trace to send instead of a workload")
    trace.add_argument("--trace-format", choices=[one.value for one in TraceFormat], help="(default: as it looks)")
    trace.add_argument("--self-timed", action=argparse.BooleanOptionalAction, default=True, help="at the trace's own "
                       "times, not at --request-rate; sessions have none")  # fmt: skip
    trace.add_argument("--time-scale", type=above_zero, default=1.0, help="times and think times are multiplied by "
                       "this")  # fmt: skip
    trace.add_argument("--length-scale", type=above_zero, default=1.0, help="lengths and blocks are multiplied by this")
    trace.add_argument("--max-input-len", type=positive, help="longer prompts are left out, and counted")
    trace.add_argument("--max-think-time", type=not_negative, default=float("inf"), help="seconds; longer think times "
                       "of sessions are cut")  # fmt: skip
    trace.add_argument("--timed-trace-chunk-hash-size", type=positive, help="tokens of a block in Mooncake's format "
                       "(default: 512)")  # fmt: skip
    trace.add_argument("--timed-trace-sec-multiplier", type=above_zero, help="seconds of a timestamp's unit in "
                       "Mooncake's format (default: 0.001)")  # fmt: skip


def _add_requests(serve: argparse.ArgumentParser) -> None:
    form = serve.add_argument_group("requests")
    form.add_argument("--prompt-form", choices=[one.value for one in PromptForm], help="token ids, or text of as many "
                      "tokens, which needs /tokenize or --tokenizer (default: ids; chats are text)")  # fmt: skip
    form.add_argument("--history", choices=[one.value for one in History], default=History.ANSWERS.value, help="what "
                      "stands for the answers in later turns: the server's, or scripted tokens")  # fmt: skip
    form.add_argument("--token-ids", type=_id_range, metavar="FIRST:LAST", help="prompts are made of these (default: "
                      "those of English words, by --tokenizer or the server's /tokenize)")  # fmt: skip
    form.add_argument("--tokenizer", help="a tokenizer.json or a folder with one (default: the server's /tokenize)")
    form.add_argument("--ignore-eos", action="store_true", help="have answers go on to their planned length")
    form.add_argument("--temperature", type=not_negative, default=0.0, help="of sampling")
    form.add_argument("--extra-body", type=json_object, default={}, help="further fields of each request, in JSON")


def _add_load(serve: argparse.ArgumentParser) -> None:
    load = serve.add_argument_group("load")
    load.add_argument("--request-rate", type=_rate, help="sessions that start in a second, on average (default: inf, "
                      "all at once)")  # fmt: skip
    load.add_argument("--burstiness", type=_rate, default=1.0, help="shape of the gamma distribution of gaps: 1 is "
                      "Poisson, less comes in bursts, inf is a clock's tick")  # fmt: skip
    load.add_argument("--max-concurrency", type=positive, help="requests under way at once (default: no limit)")
    load.add_argument("--num-warmups", type=_whole, default=0, help="small requests before the first that counts")


def _add_result(serve: argparse.ArgumentParser) -> None:
    result = serve.add_argument_group("results")
    result.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el,client_queue_time",
                        help=f"what the table shows, of {', '.join(LATENCIES)}")  # fmt: skip
    result.add_argument("--metric-percentiles", default="50,90,99", help="which percentiles")
    result.add_argument("--goodput", nargs="+", default=[], metavar="KEY:VALUE", help="limits in milliseconds that a "
                        "good answer keeps: ttft, tpot, itl, e2el")  # fmt: skip
    result.add_argument("--slo", help="the same in another spelling: ttft_ms=200,itl_ms=50")
    result.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    result.add_argument("--output", help="write the report to this JSON file")
    result.add_argument("--save-result", action="store_true", help="write it to --result-dir, named by the date")
    result.add_argument("--result-dir", help="folder for --save-result (default: the current one)")
    result.add_argument("--result-filename", help="name for --save-result")
    result.add_argument("--save-detailed", action="store_true", help="a row for each request too")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="what else the JSON should say")
    result.add_argument("--plot", help="draw latencies and load to this file, such as load.png (needs matplotlib)")
    result.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


SIZES = {
    "num_prompts": "requests in all; of a trace, at most",
    "random_input_len": "random: tokens of a prompt",
    "random_output_len": "random: tokens of an answer",
    "random_range_ratio": "random: lengths differ by up to this part, each way",
    "prefix_repetition_prefix_len": "prefix_repetition: tokens of a shared prefix",
    "prefix_repetition_suffix_len": "prefix_repetition: tokens of a prompt's own",
    "prefix_repetition_num_prefixes": "prefix_repetition: different prefixes",
    "prefix_repetition_output_len": "prefix_repetition: tokens of an answer",
    "turns": "conversations: requests of each",
    "system_len": "conversations: tokens that all begin with",
    "first_turn_len": "conversations: further tokens of the first prompt",
    "turn_len": "conversations: new tokens of each later prompt",
    "turn_output_len": "conversations: tokens of an answer",
    "think_time": "conversations: mean seconds from an answer to the next prompt, exponential",
    "long_len": "back_to_back: tokens of a prompt",
    "long_output_len": "back_to_back: tokens of an answer",
    "long_distinct": "back_to_back: different prompts, sent in turn",
}


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _rate(text: str) -> float:
    """Above 0; infinity counts."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of token ids, such as 1000:30000")
    return int(first), int(last)
