"""Functions that are compiled only as parts of the loops that call them.

Promises   no machine code, no wrappers, and no optimisation that the caller's repeats. One compilation serves all calls
           whose arguments differ only in being a constant or in the width of a signed integer.

The cost of compiling loops is numba's Python code, per instruction and per form of the arguments. LLVM adds to it for
each function that Python can call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary


class _Library(JITCodeLibrary):
    """Code that is only linked into its callers' code."""

    def _optimize_final_module(self) -> None:
        codegen = self._codegen
        passes, builder = codegen._module_pass_manager(
            loop_vectorize=False, slp_vectorize=False, opt=codegen._opt_level, cost="cheap"
        )
        passes.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class Part(compiler.Compiler):
    """numba's compiler, without machine code."""

    def __init__(
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any, locals: Any
    ):
        flags.no_compile = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)
        self.state.library = _Library(targetctx.codegen(), f"part{id(self)}")


def make_part(dispatcher: Any) -> None:
    """Makes this module's promises true for a dispatcher with ``Part`` as its compiler."""
    function, fold = dispatcher.py_func, dispatcher._compiler.fold_argument_types

    def add_overload(result: Any) -> None:
        key = object()  # by which calls find it; numba's own is the machine code's wrapper
        dispatcher.targetctx.insert_user_function(key, result.fndesc, [result.library])
        dispatcher.overloads[tuple(result.signature.args)] = result._replace(entry_point=key)

    def fold_argument_types(args: Sequence[Any], kws: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        signature, folded = fold(args, kws)
        return signature, tuple(_widened(kind) for kind in folded)

    dispatcher.add_overload = add_overload
    dispatcher._compiler.fold_argument_types = fold_argument_types
    dispatcher._compile_for_args = _python(function)


def _widened(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if kind in (types.int8, types.int16, types.int32) else kind


def _python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function that a dispatcher without machine code runs when Python calls it."""

    def entry(*_: Any, **__: Any) -> Callable[..., Any]:
        return function

    return entry
