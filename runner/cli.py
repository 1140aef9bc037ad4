"""The ``kvtier`` command: its subcommands, and the meaning of its exit status."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from runner.commands import bench, calibrate, demo, doctor, explain, plan, remote, serve, verify, warmup

COMPLETING = "_ARGCOMPLETE"
"""The variable by which a shell asks argcomplete."""
BROKEN_PIPE = 141
"""Exit status, as shells have it, if whoever reads our output has gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; exit status 0 if all went well, 1 if a result is wrong, 2 for input that cannot work."""
    try:
        try:
            return _main(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()  # else the interpreter would, and say what no reader is left for
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return BROKEN_PIPE


def _main(given: list[str]) -> int:
    if given[:1] == ["store"]:
        print("kvtier: the command is called `kvtier remote`", file=sys.stderr)
        return 2
    found = parser()
    if COMPLETING in os.environ:
        _complete(found)
    if not given:
        found.print_help()
        return 0
    return _run(found.parse_args(given), given[0])


def _run(args: argparse.Namespace, command: str) -> int:
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130
    except Exception as problem:
        from kvtier.machine.errors import KVTierError  # late: it is not always needed
        from runner.errors import of_missing

        told = problem if isinstance(problem, KVTierError) else of_missing(problem, f"kvtier {command}")
        if told is None:
            raise
        print(f"kvtier: {told}", file=sys.stderr)
        return 2


def _reader_has_gone() -> bool:
    """Whether nobody reads stdout; if so, what is still to be written goes nowhere."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not watched.poll(0):  # errors and ends are told unasked
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def _complete(found: argparse.ArgumentParser) -> None:
    """Answers a shell that asks what may come next, and ends the process."""
    with suppress(ImportError):
        import_module("argcomplete").autocomplete(found)


class _Version(argparse.Action):
    """Asks the installation for its version; kvtier itself, which takes a second to import, if there is none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("kvtier")
        except PackageNotFoundError:
            from kvtier import __version__ as found

        print(f"{parser.prog} {found}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Names the option that an unknown one may have been meant for."""

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        args, unknown = super().parse_known_args(*given, **more)
        for text in unknown:
            flag = text.partition("=")[0]
            shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            near = get_close_matches(flag, shown, n=1) if flag.startswith("--") else []
            if near:
                self.error(f"unrecognized arguments: {flag}; is it {near[0]}?")
        return args, unknown


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="kvtier", description="The KV cache for hybrid-attention language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, verify, plan, calibrate, warmup, serve, explain, bench, remote, doctor):
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
