"""Texts that are held to a grammar: xgrammar's, for the tokenizer of one model.

Owns       the grammars that were compiled last.
Promises   compiling blocks no thread but its own, and lets others run meanwhile. After a text is complete only EOS may
           come. A grammar that fails, or takes too long, ends its own request.
Does not   import xgrammar before the first grammar (``kvtier[structured]``).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.errors import InvalidRequest
from runner.errors import GrammarFailed, MissingPackage
from runner.structured_outputs import StructuredOutputs

CACHE_BYTES = 2**28
"""The most bytes of kept grammars. A grammar over 262,144 tokens takes some 2 to 30 MB."""

COMPILED_AT_ONCE = 2
"""Grammars compiled at once; further ones wait for their turn."""

SLOW_S = 0.5
"""CPU time that one token of one request may take its grammar. Usual ones take less than a millisecond."""


class GrammarCompiler:
    """Makes grammars for one model. ``compile`` may be called on any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """``tokenizer``: a transformers tokenizer, or None; ``vocab_size``: the width of the model's logits."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [int(token) for token in eos_ids if 0 <= token < vocab_size]
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(COMPILED_AT_ONCE)
        self._made: tuple[Any, Any, bool] | None = None
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of ``outputs``; at once if it was compiled lately, whatever is being compiled.

        Raises ``InvalidRequest`` if it is no grammar, or costs too much, or the model cannot be held to one, and
        ``MissingPackage`` without xgrammar.
        """
        found = self._found(outputs)
        if found is not None:
            return found
        xgrammar, compiler, is_spaced = self._compiler()
        with self._turns:
            found = self._found(outputs)  # another turn may have been for the same
            if found is not None:
                return found
            with _refusals(f"structured_outputs.{outputs.kind} cannot be used"):
                grammar = _grammar(xgrammar.Grammar, outputs)
                if is_spaced:
                    grammar = xgrammar.Grammar.concat(xgrammar.Grammar.from_ebnf('root ::= " "'), grammar)
                found = Grammar(xgrammar, compiler.compile_grammar(grammar), self._vocab_size)
            found.try_out()
            return self._keep(outputs, found)

    def _found(self, outputs: StructuredOutputs) -> Grammar | None:
        with self._lock:
            if outputs in self._kept:
                self._kept.move_to_end(outputs)
            return self._kept.get(outputs)

    def _keep(self, outputs: StructuredOutputs, grammar: Grammar) -> Grammar:
        """Keeps a grammar, or an equal one of another turn; returns the kept one."""
        with self._lock:
            grammar = self._kept.setdefault(outputs, grammar)
            while sum(one.nbytes for one in self._kept.values()) > CACHE_BYTES:
                self._kept.popitem(last=False)
        return grammar

    def _compiler(self) -> tuple[Any, Any, bool]:
        """xgrammar, its compiler, and whether a space stands before each token."""
        with self._lock:
            if self._made is None:
                if self._tokenizer is None:
                    raise InvalidRequest("structured_outputs needs a tokenizer, and this model has none")
                if not self._eos_ids:
                    raise InvalidRequest("structured_outputs needs an end-of-sequence token, and this model has none")
                xgrammar = _xgrammar()
                with _refusals("structured_outputs is not supported with this model's tokenizer"):
                    vocabulary, is_spaced = _vocabulary(xgrammar, self._tokenizer, self._vocab_size, self._eos_ids)
                    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
                self._made = xgrammar, compiler, is_spaced
            return self._made


class Grammar:
    """A compiled grammar; any number of requests may use it."""

    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._xgrammar, self._compiled, self._vocab_size = xgrammar, compiled, vocab_size
        self.nbytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        """For a new request."""
        return Matcher(self._xgrammar, self._xgrammar.GrammarMatcher(self._compiled), self._vocab_size)

    def try_out(self) -> None:
        """Raises ``InvalidRequest`` if not even a first token can be chosen, or not in time."""
        matcher = self.matcher()
        allowed = torch.empty(1, matcher.words, dtype=torch.int32)
        fill([matcher], allowed)
        if matcher.error is not None:
            raise InvalidRequest(f"structured_outputs cannot be used: {matcher.error}")
        if not allowed.any():
            raise InvalidRequest("structured_outputs cannot be used: no token of this model begins such a text")


class Matcher:
    """The progress of one request's text. ``error``: why no further token can be chosen, if there is a reason."""

    def __init__(self, xgrammar: Any, inner: Any, vocab_size: int) -> None:
        self.xgrammar, self.inner = xgrammar, inner
        self.words = -(-vocab_size // 32)
        """Of 32 bits, one a token."""
        self.error: GrammarFailed | None = None

    def take(self, token: int) -> None:
        """The next token. Raises nothing."""
        if self.error is not None:
            return
        start = time.thread_time()
        try:
            if self.inner.is_terminated():
                self.error = GrammarFailed("the text is complete, and yet it was given a further token")
            elif not self.inner.accept_token(int(token)):
                self.error = GrammarFailed(f"the grammar does not allow token {token}, which was chosen")
        except RuntimeError as problem:
            self.error = GrammarFailed(f"the grammar failed: {_said(problem)}")
        self.charge(time.thread_time() - start)

    def charge(self, seconds: float) -> None:
        """One token has taken this much CPU time."""
        if self.error is None and seconds > SLOW_S:
            self.error = GrammarFailed(f"the grammar took {seconds:.1f} s for one token; make it less ambiguous")

    @property
    def is_open(self) -> bool:
        """Whether there is a next token to choose."""
        return self.error is None and not self.inner.is_terminated()


def fill(matchers: Sequence[Matcher], allowed: Tensor) -> None:
    """Sets allowed int32 [m, words], bit i of a row being token i; zeros for a matcher with nothing to choose."""
    live = [row for row, matcher in enumerate(matchers) if matcher.is_open]
    if len(live) < len(matchers):
        allowed.zero_()
    if not live:
        return
    batch = matchers[0].xgrammar.BatchGrammarMatcher()
    start = time.perf_counter()
    try:
        batch.batch_fill_next_token_bitmask([matchers[row].inner for row in live], allowed, live)
        if time.perf_counter() - start <= SLOW_S:
            return
    except RuntimeError:
        pass
    for row in live:  # which of them it was
        _fill_one(matchers[row], allowed, row)


def _fill_one(matcher: Matcher, allowed: Tensor, row: int) -> None:
    start = time.thread_time()
    try:
        matcher.inner.fill_next_token_bitmask(allowed, row)
    except RuntimeError as problem:
        matcher.error = GrammarFailed(f"the grammar failed: {_said(problem)}")
    matcher.charge(time.thread_time() - start)
    if matcher.error is not None:
        allowed[row] = 0


class Masks:
    """Tokens forbidden by the grammars of requests that are sampled together."""

    def __init__(
        self,
        matchers: Sequence[Matcher],
        min_tokens: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
        vocabulary: int,
    ) -> None:
        self._matchers, self._vocabulary = tuple(matchers), vocabulary
        self._allowed = torch.empty(len(matchers), -(-vocabulary // 32), dtype=torch.int32)
        self._min_tokens = np.array(min_tokens, np.uint64)
        self._is_stop = None
        if any(min_tokens):
            is_stop = np.zeros((len(matchers), 32 * self._allowed.shape[1]), bool)
            for row, ids in enumerate(stop_ids):
                is_stop[row, [token for token in ids if token < vocabulary]] = True
            self._is_stop = np.packbits(is_stop, axis=1, bitorder="little").view(np.int32)

    def forbidden(self, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """Of the next token of requests that have taken uint64 [m] tokens: bool [m, vocab] on the host.

        Tokens that end a text are forbidden before ``min_tokens``, unless nothing else is left.
        """
        fill(self._matchers, self._allowed)
        allowed = self._allowed.numpy()
        if self._is_stop is not None and (early := drawn < self._min_tokens).any():
            others = allowed & ~self._is_stop
            allowed = np.where((early & others.any(axis=1))[:, None], others, allowed)
        bits = np.unpackbits((~allowed).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocabulary]).view(torch.bool)


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


def _grammar(grammars: Any, outputs: StructuredOutputs) -> Any:
    if outputs.json is not None:
        return _strict(grammars, grammars.from_json_schema(outputs.json))
    if outputs.regex is not None:
        return grammars.from_regex(outputs.regex)
    if outputs.choice is not None:
        quoted = (json.dumps(one, ensure_ascii=False) for one in outputs.choice)
        return grammars.from_ebnf(f"root ::= {' | '.join(quoted)}")
    if outputs.grammar is not None:
        return grammars.from_ebnf(outputs.grammar)
    return grammars.from_json_schema('{"type": "object", "additionalProperties": true}')


def _strict(grammars: Any, grammar: Any) -> Any:
    """The grammar of a JSON schema, without the control characters that xgrammar lets into strings of limited
    length."""
    text = str(grammar)
    loose, strict = r"""[^\"\\\r\n]""", r"""[^\0-\x1f\"\\]"""
    return grammars.from_ebnf(text.replace(loose, strict)) if loose in text else grammar


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turns xgrammar's errors into ``InvalidRequest``."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, UnicodeError, RecursionError) as problem:
        raise InvalidRequest(f"{what}: {_said(problem)}") from problem


def _said(problem: BaseException) -> str:
    """The message, without the time and the place in xgrammar's sources."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(problem))
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    return " ".join(text.split())[:500]
