"""The reference engine: the package ``runner`` beside this one, whatever else has that name.

``runner.py`` is a likely name for a script, and a folder with one stands before all installed packages on the search
path. So the package is loaded from its place, not looked up.

``python -m kvtier.machine.reference_engine MODULE ARGUMENT...`` runs one of its modules, as ``python -m`` does.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

NAME = "runner"
PLACE = Path(__file__).resolve().parents[2] / NAME / "__init__.py"


def load() -> ModuleType:
    """The package; imports nothing that its own names need.

    Raises ``ImportError`` if it is not installed, or if this process has imported another module of its name.
    """
    there = sys.modules.get(NAME)
    if there is not None:
        file = getattr(there, "__file__", None)
        if file is not None and Path(file).resolve() == PLACE:
            return there
        raise ImportError(
            f"this process has imported another module called {NAME} ({file}), and kvtier's reference engine has that "
            "name too: rename the other one, or serve in a process of its own",
            name=NAME,
        )
    spec = spec_from_file_location(NAME, PLACE, submodule_search_locations=[str(PLACE.parent)])
    if not PLACE.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"kvtier's reference engine is not installed: there is no {PLACE}", name=NAME)
    module = sys.modules[NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module


def as_main(module: str, *arguments: str) -> list[str]:
    """Arguments of Python that run one of its modules in a new process."""
    return ["-m", "kvtier.machine.reference_engine", module, *arguments]


if __name__ == "__main__":
    import runpy

    load()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
