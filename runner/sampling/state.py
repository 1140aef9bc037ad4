"""The state that one request's next token depends on beside its logits.

Owns       its tokens so far, as far as its parameters look at them.
Promises   only ``take`` changes it: two equal questions get equal answers, preempted in between or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import InvalidRequest
from runner.errors import RunnerError
from runner.sampling.bad_words import Ban
from runner.sampling.grammars.matching import Matcher
from runner.sampling.params import SamplingParams
from runner.sampling.penalties import Tally


class Follower(Protocol):
    """Looks at each token that a request takes."""

    def take(self, token: int) -> None:
        """The next one."""


@dataclass(eq=False, slots=True)
class SamplingState:
    """One request's. ``stop_ids``: the tokens that end its text."""

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    tally: Tally | None = None
    ban: Ban | None = None
    matcher: Matcher | None = None
    followers: tuple[Follower, ...] = ()

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: npt.ArrayLike = (),
        eos_token_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> SamplingState:
        """A new request's; it gets a fresh seed if its parameters name none.

        prompt_tokens int [n], for ``repetition_penalty``. ``eos_token_ids``: what ``min_tokens`` holds back beside
        ``stop_token_ids``. ``matcher``: a new one of the grammar that ``structured_outputs`` compiles to.
        ``bad_words``: what ``bad_words.tokens_of`` makes of ``params.bad_words``. Raises ``InvalidRequest`` if one of
        these two is missing.
        """
        if params.structured_outputs is not None and matcher is None:
            raise InvalidRequest("structured_outputs needs a grammar, made by a GrammarCompiler")
        if params.bad_words and not bad_words:
            raise InvalidRequest("bad_words are text; this model has no tokenizer to read them with")
        seed = secrets.randbits(64) if params.seed is None else int(params.seed) % 2**64
        stop_ids = tuple(dict.fromkeys([*map(int, eos_token_ids), *(params.stop_token_ids or ())]))
        tally = None
        if params.repetition_penalty != 1:
            tally = Tally(np.asarray(prompt_tokens))
        elif params.presence_penalty or params.frequency_penalty:
            tally = Tally()
        ban = Ban(bad_words) if bad_words else None
        followers = tuple(one for one in (tally, ban, matcher) if one is not None)
        return cls(params, seed, stop_ids, tally, ban, matcher, followers)

    def take(self, token: int) -> None:
        """The request has taken this token: for ``followers``. Raises nothing; ``error`` may be set afterwards."""
        for follower in self.followers:
            follower.take(token)

    @property
    def error(self) -> RunnerError | None:
        """Why it can take no further token."""
        return None if self.matcher is None else self.matcher.error
