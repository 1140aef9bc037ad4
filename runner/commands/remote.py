"""``kvtier remote``: what lies in a remote tier, and its upkeep."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from runner.commands.arguments import positive

SECRET_VARIABLE = "KVTIER_KEY_SECRET"
_URI = "file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


def add_to(commands: Any) -> None:
    """Adds the subcommand and its own."""
    store = commands.add_parser(
        "remote",
        help="list, check and clear up a remote that caches share",
        description="A remote has objects of one or more namespaces: one for each model, geometry and secret. Caches "
        "may go on reading and writing meanwhile.",
        epilog="Status 0 if all went well, 1 if `verify` found a wrong object, 2 if the remote, or "
        "a part of it, cannot be used.",
    )
    actions = store.add_subparsers(required=True, metavar="action")
    ls = _action(actions, "ls", _ls, "list the namespaces, or the objects of one")
    _model(ls, "list the objects of this namespace")
    ls.add_argument("--limit", type=positive, default=50, help="objects shown, the newest first (default: 50)")
    _action(actions, "stat", _stat, "count objects and bytes by namespace and kind")
    gc = _action(
        actions,
        "gc",
        _gc,
        "remove the oldest objects, and what killed writers left",
        "Removes the oldest objects until the rest fits. In a directory a hit makes an object young again, once an "
        "hour at most, and one `gc` works at a time. In a bucket objects have the age of their writing, so its own "
        "lifecycle rules do the same at less cost.",
    )
    gc.add_argument("--max-bytes", required=True, help="of all objects together, each at least 4 KiB; such as 500GiB")
    _model(gc, "only of this namespace: a quota for one model")
    gc.add_argument("--every", type=positive, metavar="SECONDS", help="again and again, until SIGINT or SIGTERM")
    gc.add_argument("--dry-run", action="store_true", help="remove nothing, and say what would be")
    verify = _action(
        actions,
        "verify",
        _verify,
        "read all objects and check each against its trailer and its name",
        f"A digest (?digest=blake2b) is checked too if {SECRET_VARIABLE} holds the key secret.",
    )
    _model(verify, "only of this namespace")
    verify.add_argument("--delete", action="store_true", help="remove the wrong objects")
    verify.add_argument("--threads", type=positive, default=4, help="that read (default: 4)")
    rm = _action(actions, "rm", _rm, "remove a namespace")
    _model(rm, "the namespace, 32 hexadecimal digits, as `ls` shows it", required=True)


def _action(actions: Any, name: str, run: Callable[[Any, Any], int], about: str, more: str = "") -> Any:
    parser = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}")
    parser.add_argument("uri", help=_URI)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else on stdout")
    parser.set_defaults(run=lambda args: _with_shelf(run, args))
    return parser


def _model(parser: Any, about: str, required: bool = False) -> None:
    parser.add_argument("--model", metavar="NAMESPACE", type=_namespace, required=required, help=about)


def _namespace(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace: 32 hexadecimal digits, as in `kvtier remote ls`")
    return text


def _with_shelf(run: Callable[[Any, Any], int], args: argparse.Namespace) -> int:
    """Exit status of the command."""
    from kvtier.remote.keeper.shelf import open_shelf

    shelf = open_shelf(args.uri)
    status = _serving(args.uri, partial(run, shelf, args), gives_up=True)
    return status if status else _skipping(shelf)


def _skipping(shelf: Any) -> int:
    """Exit status 2 if something was skipped, which is told."""
    if str(shelf.skipped):
        print(f"kvtier: {shelf.skipped}", file=sys.stderr)
    return 2 if str(shelf.skipped) else 0


def _serving(uri: str, run: Callable[[], int], gives_up: bool = False) -> int:
    """Exit status of ``run``; 2 if the remote does not serve, or if another keeper is at work there."""
    from kvtier.machine.errors import KVTierError
    from kvtier.remote.backends.threads import reason_of

    try:
        return run()
    except KVTierError as problem:
        if gives_up:
            raise
        print(f"kvtier: {problem}", file=sys.stderr)
    except Exception as problem:  # the remote's library has errors of its own
        if not isinstance(problem, OSError) and not type(problem).__module__.startswith("obstore"):
            raise
        print(f"kvtier: {uri} does not serve: {reason_of(problem)}", file=sys.stderr)
    return 2


def _ls(shelf: Any, args: argparse.Namespace) -> int:
    from kvtier.remote.keeper.upkeep import contents

    if args.model:
        return _ls_objects(shelf, args)
    with _bar(args, "listing") as (_, step):
        found = contents(shelf, step)
    if args.json:
        print(json.dumps({name: _plain(share) for name, share in found.by_namespace.items()}, indent=2))
        return 0
    rows = [(name, share) for name, share in sorted(found.by_namespace.items())]
    _table("Namespaces", ("namespace",), [((name,), share) for name, share in rows])
    return 0


def _ls_objects(shelf: Any, args: argparse.Namespace) -> int:
    import heapq

    with _bar(args, "listing") as (_, step):
        total, newest = 0, list[Any]()
        for entry in shelf.entries(args.model):
            step(entry.num_bytes)
            if not entry.is_staging:
                total += 1
                (heapq.heappush if len(newest) < args.limit else heapq.heappushpop)(newest, entry)
    shown = sorted(newest, reverse=True)
    if args.json:
        rows = [{"name": e.name, "bytes": e.num_bytes, "modified_unix_s": e.modified_s} for e in shown]
        print(json.dumps({"objects": total, "newest": rows}, indent=2))
        return 0
    for entry in shown:
        print(f"{entry.name}  {_size(entry.num_bytes)}  {_age(entry.modified_s)}")
    if total > len(shown):
        print(f"and {total - len(shown):,} older ones (--limit)")
    return 0


def _stat(shelf: Any, args: argparse.Namespace) -> int:
    from kvtier.remote.keeper.upkeep import contents

    with _bar(args, "counting") as (_, step):
        found = contents(shelf, step)
    if args.json:
        kinds = [{"namespace": n, "kind": k, **_plain(share)} for (n, k), share in found.by_kind.items()]
        more = {"kinds": kinds, "staging": _plain(found.staging), "skipped": vars(shelf.skipped)}
        print(json.dumps(_plain(found.all) | more, indent=2))
        return 0
    rows = sorted(found.by_kind.items())
    _table("Objects", ("namespace", "kind"), [*rows, (("all", ""), found.all)] if rows else [])
    if found.staging.objects:
        count, size = found.staging.objects, _size(found.staging.num_bytes)
        print(f"staging files of writers, at work or killed: {count:,}, {size}")
    return 0


def _gc(shelf: Any, args: argparse.Namespace) -> int:
    from kvtier.geometry.sizing import parse_bytes

    most = parse_bytes(args.max_bytes, "--max-bytes")
    if args.every is None:
        return _gc_once(shelf, args, most)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.is_set():
        _serving(args.uri, partial(_gc_once, shelf, args, most))  # what went wrong may go right the next time
        _skipping(shelf)
        shelf.skipped.clear()
        sys.stdout.flush()
        stop.wait(args.every)
    return 0


def _gc_once(shelf: Any, args: argparse.Namespace, most: int) -> int:
    from kvtier.remote.keeper.upkeep import collect

    shelf.skipped.clear()
    space = args.model or ""
    with _bar(args, "listing") as (bar, step):
        total = sum(entry.num_bytes for entry in shelf.entries(space) if not entry.is_staging)
        bar("removing", max(0, total - most))
        found = collect(shelf, most, step, namespace=space, only_tell=args.dry_run)
    return _removed(shelf, found, args, "would be removed" if args.dry_run else "removed")


def _rm(shelf: Any, args: argparse.Namespace) -> int:
    from kvtier.remote.keeper.upkeep import forget

    with _bar(args, "listing") as (bar, step):
        total = sum(entry.num_bytes for entry in shelf.entries(args.model))
        bar("removing", total)
        found = forget(shelf, args.model, step)
    if not found.removed and not found.swept and not str(shelf.skipped):
        print(f"kvtier: there is no namespace {args.model}", file=sys.stderr)
        return 2
    return _removed(shelf, found, args, "removed")


def _removed(shelf: Any, found: Any, args: argparse.Namespace, verb: str) -> int:
    if args.json:
        lines = None if getattr(args, "every", None) else 2  # a line a time, if there are many
        more = {"dry_run": bool(getattr(args, "dry_run", False)), "skipped": vars(shelf.skipped)}
        print(json.dumps(vars(found) | more, indent=lines))
        return 0
    others = (found.damaged, "damaged ones, too short"), (found.swept, "abandoned staging files")
    also = "".join(f", {count:,} {what}" for count, what in others if count)
    print(
        f"{verb}: {found.removed:,} objects, {_size(found.removed_bytes)}{also}; "
        f"left: {found.left:,} objects, {_size(found.left_bytes)}"
    )
    return 0


def _verify(shelf: Any, args: argparse.Namespace) -> int:
    from kvtier.remote.keeper.upkeep import verify

    secret = os.environb.get(SECRET_VARIABLE.encode(), b"").strip() or None
    with _bar(args, "listing") as (bar, step):
        total = sum(entry.num_bytes for entry in shelf.entries(args.model or "") if not entry.is_staging)
        bar("reading", total)
        found = verify(shelf, step, namespace=args.model or "", secret=secret, threads=args.threads)
        removed = sum(1 for _ in shelf.remove(found.entries)) if args.delete else 0
    if args.json:
        print(json.dumps(found.to_dict() | {"removed": removed, "skipped": vars(shelf.skipped)}, indent=2))
    else:
        for name, reason in found.wrong:
            print(f"{name}: {reason}")
        print(f"{found.objects:,} objects, {_size(found.num_bytes)}: {len(found.wrong):,} wrong, {removed:,} removed")
    return _skipping(shelf) or (1 if found.wrong else 0)


@contextmanager
def _bar(args: argparse.Namespace, what: str) -> Iterator[tuple[Callable[[str, int], None], Callable[[int], None]]]:
    """(begins a part of so many bytes, tells of bytes done): a bar on stderr that goes away when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True, quiet=args.json), transient=True)
    with progress.live:
        task = progress.add_task(what, total=None)

        def begin(name: str, total: int) -> None:
            progress.reset(task, description=name, total=total)

        yield begin, lambda count: progress.advance(task, count)


def _table(title: str, names: tuple[str, ...], rows: list[tuple[tuple[str, ...], Any]]) -> None:
    from rich.console import Console

    from runner.display.tables import plain_table, print_table

    if not rows:
        print("no objects")
        return
    table = plain_table(title, names, ("objects", "size", "newest", "oldest"))
    for texts, share in rows:
        ages = _age(share.newest_s), _age(share.oldest_s)
        table.add_row(*texts, f"{share.objects:,}", _size(share.num_bytes), *ages)
    print_table(Console(), table)


def _plain(share: Any) -> dict[str, Any]:
    times = {"oldest_unix_s": share.oldest_s, "newest_unix_s": share.newest_s} if share.objects else {}
    return {"objects": share.objects, "bytes": share.num_bytes, **times}


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _age(modified_s: float) -> str:
    seconds = time.time() - modified_s
    if seconds < 0:
        return "in the future"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
