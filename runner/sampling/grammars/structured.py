"""Grammars that texts are held to: xgrammar's, for the tokenizer of one model.

Owns       the grammars that were compiled last.
Promises   compiling keeps nobody waiting who does not ask for a grammar, and has an end (``grammar_jobs.py``).
Does not   import xgrammar before the first grammar (``kvtier[structured]``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from kvtier.machine.errors import InvalidRequest
from runner.errors import MissingPackage
from runner.sampling.grammars.child import said
from runner.sampling.grammars.jobs import Compilations
from runner.sampling.grammars.matching import Grammar
from runner.sampling.grammars.structured_outputs import StructuredOutputs

CACHE_BYTES = 2**28
"""The most bytes of kept grammars. A grammar over 262,144 tokens takes some 2 to 30 MB."""

LIMIT_S = 10.0
"""CPU seconds that compiling one grammar may take, unless told otherwise. A JSON schema of 20 nested objects takes 3 s
over 262,144 tokens."""


class GrammarCompiler:
    """Makes grammars for one model. Any thread may call it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limit_s: float = LIMIT_S) -> None:
        """``tokenizer``: a transformers tokenizer, or None; ``vocab_size``: the width of the model's logits;
        ``limit_s``: CPU seconds that compiling one grammar may take."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [int(token) for token in eos_ids if 0 <= token < vocab_size]
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._made: tuple[Any, Any] | None = None
        """xgrammar, and the vocabulary as it knows it."""
        self._compilations = Compilations(self._start, self._finish, limit_s)

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of ``outputs``; at once if it was compiled lately, whatever is being compiled.

        Raises ``InvalidRequest`` if it is no grammar, or costs too much, or the model cannot be held to one. Raises
        ``MissingPackage`` without xgrammar, and ``GrammarFailed`` if no process can be started for it.
        """
        future = self.begin(outputs)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """Begins to compile, for a caller that does something else meanwhile. To leave, it cancels the future."""
        with self._lock:
            found = self._kept.get(outputs)
            if found is not None:
                self._kept.move_to_end(outputs)
        if found is not None:
            future: Future[Grammar] = Future()
            future.set_result(found)
            return future
        value = getattr(outputs, outputs.kind)
        words = -(-self._vocab_size // 32)
        return self._compilations.begin(outputs, {"kind": outputs.kind, "value": value, "words": words})

    def close(self) -> None:
        """Ends what is being compiled."""
        self._compilations.close()

    def _start(self) -> dict[str, Any]:
        """The facts that the process that compiles has to know."""
        if self._tokenizer is None:
            raise InvalidRequest("structured_outputs needs a tokenizer, and this model has none")
        if not self._eos_ids:
            raise InvalidRequest("structured_outputs needs an end-of-sequence token, and this model has none")
        xgrammar = _xgrammar()
        with _refusals("structured_outputs is not supported with this model's tokenizer"):
            info, is_spaced = _vocabulary(xgrammar, self._tokenizer, self._vocab_size, self._eos_ids)
        self._made = xgrammar, info
        return {"vocabulary": info.serialize_json(), "is_spaced": is_spaced}

    def _finish(self, outputs: Any, text: str) -> Grammar:
        """Keeps a compiled grammar."""
        assert self._made is not None
        xgrammar, info = self._made
        with _refusals(f"structured_outputs.{outputs.kind} cannot be used"):
            grammar = Grammar(xgrammar, xgrammar.CompiledGrammar.deserialize_json(text, info), self._vocab_size)
        with self._lock:
            grammar = self._kept.setdefault(outputs, grammar)
            while sum(one.nbytes for one in self._kept.values()) > CACHE_BYTES:
                self._kept.popitem(last=False)
        return grammar


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as problem:
        raise MissingPackage(
            "structured_outputs needs xgrammar; install it with: pip install 'kvtier[structured]'"
        ) from problem
    return xgrammar


def _vocabulary(xgrammar: Any, tokenizer: Any, vocab_size: int, eos_ids: list[int]) -> tuple[Any, bool]:
    """The bytes that each token adds to a text, as xgrammar's ``TokenizerInfo``; special tokens add none.

    A tokenizer without a decoder puts a space between two tokens. For the grammar a space stands before each token, the
    first included.
    """
    size = max(len(tokenizer), vocab_size)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_spaced = backend is not None and backend.decoder is None
    if is_spaced:
        texts: list[bytes] = [b""] * size
        for text, token in tokenizer.get_vocab().items():
            texts[token] = b" " + text.encode()
    else:
        texts = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=size, stop_token_ids=eos_ids
        ).decoded_vocab
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for token in special | set(tokenizer.all_special_ids):
        texts[token] = b""
    kinds = xgrammar.VocabType
    info = xgrammar.TokenizerInfo(
        texts[:vocab_size], kinds.RAW, vocab_size=vocab_size, stop_token_ids=eos_ids, add_prefix_space=False
    )
    return info, is_spaced


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turns xgrammar's errors into ``InvalidRequest``."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, UnicodeError, RecursionError) as problem:
        raise InvalidRequest(f"{what}: {said(problem)}") from problem
