"""Imports point one way, and torch is imported only where tensors are."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import kvtier

PACKAGE = Path(kvtier.__file__).parent
RUNNER = Path(importlib.util.find_spec("runner").origin).parent

FLOORS = (  # each room may import the rooms above it, and none of its own line
    ("kvtier.machine",),
    ("kvtier.geometry",),
    ("kvtier.attention", "kvtier.integrations"),  # of the library, only what needs them imports them, when it is called
    ("kvtier.pools",),
    ("kvtier.gpu_pool", "kvtier.cpu_offload"),
    ("kvtier.remote",),
    ("kvtier.coordinator",),
    ("kvtier.audit",),
    ("kvtier.host_tier",),  # a door; the other one is next, and has the events of both
    ("kvtier.cache",),
    ("kvtier",),
    ("kvtier.testing",),
    ("kvtier.integrations.vllm",),  # a plug-in: it stands on the host tier's door
    ("runner.errors",),
    ("runner.display", "runner.needle"),
    ("runner.model", "runner.sampling"),
    ("runner.engine",),
    ("runner.metrics",),
    ("runner.api",),
    ("runner",),
    ("runner.bench", "runner.demo", "runner.server", "runner.verify"),
    ("runner.plan",),  # replays traces of the load generator
    ("runner.commands",),
    ("runner.cli",),
)
BESIDE = {"kvtier.attention", "kvtier.integrations"}
OF_ENGINES = {"kvtier.integrations.vllm", "kvtier.testing"}
LAZY = {  # imported when it is called
    ("kvtier.geometry", "kvtier.integrations"),  # CacheSpec.from_config
    ("kvtier.cpu_offload", "kvtier.attention"),  # the checksum kernel, when a GPU's link is built
    ("kvtier.cache", "kvtier.attention"),  # the loops of decode steps on a CPU, when they are compiled ahead
}
READ_THE_ENVIRONMENT = {
    "kvtier.machine.loops.machine_code",
    "kvtier.audit.run",
    "kvtier.remote.backends.mooncake_library",
    "kvtier.integrations.vllm.settings",  # the secret of a remote tier
}
TENSORS = {"kvtier.pools.arena", "kvtier.attention", "kvtier.integrations", "runner"}

TESTS = Path(__file__).parents[1]
PRIVATE_PARTS = {
    "_arena",
    "_connector",
    "_coordinator",
    "_core",
    "_host",
    "_host_arena",
    "_inbox",
    "_matcher",
    "_pools",
    "_roster",
    "_running",
}


def modules() -> Iterator[tuple[str, Path]]:
    for root, name in ((PACKAGE, "kvtier"), (RUNNER, "runner")):
        for path in sorted(root.rglob("*.py")):
            parts = [name, *path.relative_to(root).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, path: Path, *, types: bool = True) -> Iterator[tuple[str, bool]]:
    """(module, whether at module level) of every import, those included, if ``types``, that only types need."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if not types:
        body = [n for n in body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node, top in statements(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide the arrow"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else str(node.module), top


def statements(body: Iterable[ast.AST], top: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """(statement, whether it is outside of all functions), of all that stand in these."""
    for node in body:
        yield node, top
        inside = top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()), inside)


NAMES = {name for name, _ in modules()}


ROOMS = [room for floor in FLOORS for room in floor]


def room_of(module: str) -> str:
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}.")), key=len)


def level(room: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if room in floor)


def is_allowed(source: str, goal: str) -> bool:
    """Whether a module of one room may import one of another."""
    if goal in BESIDE and source.startswith("kvtier."):
        return source in OF_ENGINES or (source, goal) == ("kvtier.integrations", "kvtier.attention")
    return level(goal) < level(source)


def offences() -> Iterator[str]:
    for name, path in modules():
        for target, top in imports(name, path, types=name != "kvtier"):  # which names the engine's classes for checkers
            if target.split(".")[0] not in ("kvtier", "runner"):
                continue
            source, goal = room_of(name), room_of(target)
            if source != goal and not is_allowed(source, goal) and (top or (source, goal) not in LAZY):
                yield f"{name} imports {target}"


def test_imports_point_one_way():
    assert list(offences()) == []


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, in whatever roundabout way."""
    reached, before = {name: {name} for name in arrows}, 0
    while (now := sum(map(len, reached.values()))) > before:
        before = now
        for name, targets in arrows.items():
            reached[name] |= {further for target in targets for further in reached.get(target, ())}
    return sorted([a, b] for a in arrows for b in reached[a] if a < b and a in reached[b])


def test_no_module_imports_itself_in_a_roundabout_way():
    """The facade of the package, which imports nothing until it is asked, and what functions import when called."""
    arrows = {
        name: {target for target, top in imports(name, path) if top and target in NAMES and target != name}
        for name, path in modules()
        if name not in ("kvtier", "runner")
    }
    assert circles(arrows) == []
    arrows["kvtier.machine.errors"].add("kvtier.cache.facade")
    assert ["kvtier.cache.facade", "kvtier.machine.errors"] in circles(arrows)


@pytest.mark.parametrize("package", [PACKAGE, RUNNER], ids=["kvtier", "runner"])
def test_rooms_are_few_and_nothing_lies_loose_beside_them(package):
    entries = [path.name for path in package.iterdir() if path.is_file() or any(path.rglob("*.py"))]
    assert len(entries) <= 16
    files = {name for name in entries if "." in name}
    assert files <= {"__init__.py", "__main__.py", "py.typed", "cli.py", "errors.py"}
    assert {f"{package.name}.{name.removesuffix('.py')}" for name in entries if "_" not in name[:2]} - {
        "kvtier.py.typed"
    } <= {*ROOMS}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kvtier.pools.arena", "from kvtier.cpu_offload.connector import Connector"),
        ("kvtier.gpu_pool.block_table", "from kvtier.coordinator.scheduler import Scheduler"),
        ("kvtier.cpu_offload.connector", "import kvtier.gpu_pool.block_table"),
        ("kvtier.coordinator.match", "from kvtier.cache.facade import KVCache"),
        ("kvtier.geometry.spec", "from kvtier.gpu_pool import arena"),
        ("kvtier.coordinator.plan", "from runner import LLM"),
        ("kvtier.attention.reference", "import kvtier.cache.facade"),
        ("kvtier.coordinator.step", "def f():\n    from kvtier.testing import CanaryEngine"),
    ],
)
def test_an_arrow_that_runs_back_is_seen(monkeypatch, tmp_path, name, line):
    planted = tmp_path / "planted.py"
    planted.write_text(line, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: iter([(name, planted)]))
    assert len(list(offences())) == 1


def test_torch_is_imported_at_module_level_only_where_tensors_are():
    guilty = [
        name
        for name, path in modules()
        for target, top in imports(name, path, types=False)
        if target.split(".")[0] == "torch" and top and not any(name == t or name.startswith(f"{t}.") for t in TENSORS)
    ]
    assert guilty == []


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvtier", {"numpy", "numba", "torch", "transformers"}),
        ("from kvtier import *; import kvtier.testing", {"torch", "transformers"}),
    ],
)
def test_an_import_brings_only_what_is_needed_so_far(code, absent):
    code = f"import sys; {code}; sys.exit(repr({absent!r} & set(sys.modules)) if {absent!r} & set(sys.modules) else 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert ran.returncode == 0, ran.stderr


def test_the_package_has_the_names_that_it_lists_and_no_others():
    homes = [name for names in kvtier._HOMES.values() for name in names.split()]
    assert sorted(homes) == sorted(kvtier.__all__) and set(kvtier.__all__) <= set(dir(kvtier))
    assert all(getattr(kvtier, name).__name__ == name for name in kvtier.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvtier.nothing  # noqa: B018


def test_help_version_and_usage_errors_wait_for_no_import_that_takes_seconds():
    code = """if True:
        import contextlib, io, sys
        from runner.cli import main
        helps = ["--help"], ["verify", "--help"], ["bench", "serve", "--help"]
        for given in (*helps, ["--version"], ["demo", "--tokens", "many"], []):
            with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                with contextlib.redirect_stdout(io.StringIO()):
                    main(given)
            slow = {"torch", "transformers", "numba", "numpy", "kvtier"} & set(sys.modules)
            assert not slow, (given, slow)
        import runner
        assert {"LLM", "SamplingParams", "needle"} <= set(dir(runner)) and not hasattr(runner, "nothing")
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert ran.returncode == 0, ran.stderr


def test_the_version_is_written_the_same_in_both_places():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == kvtier.__version__


def test_no_module_reads_the_environment_below_the_facade():
    """No globals that differ from run to run. The compile cache looks at where it can write; Mooncake's library has its
    time limits from there; the plug-in of vLLM has a store's secret."""
    guilty = [
        name
        for name, path in modules()
        if name.startswith("kvtier")
        and "os.environ" in path.read_text(encoding="utf-8")
        and name not in READ_THE_ENVIRONMENT
    ]
    assert guilty == []


def reaches(path: Path) -> Iterator[str]:
    """Where a test file asks an object for a private part of kvtier; what is a test class's own, it may have."""
    text = path.read_text(encoding="utf-8")
    if not any(part in text for part in PRIVATE_PARTS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_PARTS and ast.unparse(node.value) != "self":
            yield f"{path.relative_to(path.parents[1])}:{node.lineno} {ast.unparse(node)}"


def test_only_inside_knows_the_private_parts():
    files = [path for path in TESTS.rglob("*.py") if path not in (TESTS / "inside.py", TESTS / "inside_copies.py")]
    assert [reach for path in files for reach in reaches(path)] == [], "tests/inside.py has a function for it"
    assert len([*reaches(TESTS / "inside.py")]) > 5
