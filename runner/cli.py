"""The ``kvtier`` command: its subcommands, and the meaning of its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from runner.commands import bench, calibrate, demo, explain, plan, remote, serve, verify, warmup


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; exit status 0 if all went well, 1 if a result is wrong, 2 for input that cannot work."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["store"]:
        print("kvtier: the command is called `kvtier remote`", file=sys.stderr)
        return 2
    args = _parser().parse_args(given)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130
    except Exception as problem:
        from kvtier.machine.errors import KVTierError  # late, since it takes seconds to import
        from runner.errors import of_missing

        told = problem if isinstance(problem, KVTierError) else of_missing(problem, f"kvtier {given[0]}")
        if told is None:
            raise
        print(f"kvtier: {told}", file=sys.stderr)
        return 2


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="The KV cache for hybrid-attention language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, verify, plan, calibrate, warmup, serve, explain, bench, remote):
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
