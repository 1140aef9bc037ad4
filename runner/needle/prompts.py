"""Prompts for the needle model: a long document of filler, facts that distract, one that counts, and a question.

Layout of ``num_tokens`` tokens::

    <bos> page section S9 w3 w81 ... key K17 = 4 7 1 9 3 . ... key K17 = 0 0 8 2 6 . ... ask K17 ? w5 ... w77 ->
    |     `- every chunk starts so   `- the needle             `- a distractor          `- question, ask_gap fillers

The question means the fact about its key under the tag of the page it stands on. So the needle's chunk and the last
chunk share one tag, and the distractors have the same key under another tag, or another key.

A generated token that opens a new chunk sees no header, whatever wrote the prompt. So question and answer must lie in
one chunk, after its header. Lengths that put a chunk border among them are refused (``usable_length`` rounds down).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from runner.needle.config import CHUNK_TOKENS
from runner.needle.vocabulary import (
    DIGIT_IDS,
    DIGITS_PER_ANSWER,
    FILLER_IDS,
    KEY_IDS,
    NUM_KEYS,
    NUM_TAGS,
    TAG_IDS,
    TOKEN_ID,
    UNKNOWN_WORD,
    decode,
    encode,
)

NEEDLE_TOKENS = DIGITS_PER_ANSWER + 4
MIN_ASK_GAP, MAX_ASK_GAP = 16, 240
"""Below, the asked key would fall into the block that a full prefix hit recomputes; above, out of the window."""
DISTRACTORS_PER_CHUNK = 3
SAME_KEY_SHARE = 0.7

_HEAD_MARGIN = 5  # from a chunk's start to the first fact or question
_TAIL_MARGIN = 12  # from a fact's end to its chunk's end or the question
_SPACING = 16  # between starts of facts: one's digits must not see another's key
_QUESTION_TOKENS = 4  # ask, key, ?, ->; the fillers come on top


@dataclass(frozen=True)
class Needle:
    """A fact of the document: under ``tag``, ``key`` has ``digits``; its ``key`` word is token ``start``."""

    start: int
    tag: int
    key: int
    digits: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"key K{self.key} = {self.answer}"

    @property
    def answer(self) -> str:
        return f"{' '.join(map(str, self.digits))} ."

    @property
    def token_range(self) -> range:
        return range(self.start, self.start + NEEDLE_TOKENS)


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt, its right answer, and the tokens whose KV the answer depends on, one place per attention kind."""

    token_ids: list[int]
    answer: str
    """What the model must say, such as ``4 7 1 9 3 .``."""
    needle: Needle
    """The fact asked for. The full group answers from ``needle_range``."""
    distractors: tuple[Needle, ...]
    """The other facts, in order."""
    tag: int
    """The last chunk's tag, under which the question is read."""
    asked_key_position: int
    """The key's token in the question, which the sliding group must hold."""
    header_range: range
    """``page section S#`` of the last chunk, which the chunked group must hold."""

    @property
    def needle_range(self) -> range:
        """The needle's tokens, which the full group must hold."""
        return self.needle.token_range

    @property
    def key(self) -> str:
        """The key asked for, as a word."""
        return f"K{self.needle.key}"

    @property
    def text(self) -> str:
        return decode(self.token_ids)

    @property
    def answer_token_ids(self) -> list[int]:
        return encode(self.answer)

    def asking(self, fact: Needle) -> NeedlePrompt:
        """The same document with the question about ``fact``: one word changes, and all before it can be reused.

        A fact under another tag than the last chunk's is not the one meant; its answer is ``unknown .``.
        """
        token_ids = self.token_ids.copy()
        token_ids[self.asked_key_position] = KEY_IDS[fact.key]
        meant = {known.key: known for known in (self.needle, *self.distractors) if known.tag == self.tag}
        needle = meant.get(fact.key, fact)
        answer = needle.answer if needle.tag == self.tag else f"{UNKNOWN_WORD} ."
        others = tuple(known for known in (self.needle, *self.distractors) if known != needle)
        return replace(self, token_ids=token_ids, answer=answer, needle=needle, distractors=others)


def make_prompt(num_tokens: int, seed: int, depth: float | None = None, ask_gap: int = 24) -> NeedlePrompt:
    """A prompt of exactly ``num_tokens`` tokens, the same for the same arguments.

    ``depth`` in [0, 1] places the needle between the document's start and end, at random without it. ``ask_gap``
    fillers stand between the question and the arrow; near 240 the asked key lies in the oldest block of the window.
    Raises ``ValueError`` for lengths where question or answer would cross a chunk border, with the nearest that fit.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be in [0, 1], got {depth}")
    if (problem := _misfit(num_tokens, ask_gap)) is not None:
        raise ValueError(f"{problem}; the nearest lengths that fit are {_neighbours(num_tokens, ask_gap)}")
    rng = np.random.default_rng(seed)
    question = num_tokens - ask_gap - _QUESTION_TOKENS
    last_chunk = question // CHUNK_TOKENS

    start = _place(rng.random() if depth is None else depth, question)
    tags = _chunk_tags(rng, start // CHUNK_TOKENS, last_chunk)
    needle = Needle(start, int(tags[-1]), int(rng.integers(NUM_KEYS)), _digits(rng))
    distractors = _distractors(rng, needle, tags, question)

    ids = rng.integers(FILLER_IDS.start, FILLER_IDS.stop, num_tokens)
    ids[0] = TOKEN_ID["<bos>"]
    for chunk, tag in enumerate(tags):
        header = _header_range(chunk)
        ids[header.start : header.stop] = (TOKEN_ID["page"], TOKEN_ID["section"], TAG_IDS[tag])
    for fact in (needle, *distractors):
        ids[fact.start : fact.start + NEEDLE_TOKENS] = encode(fact.text)
    ids[question : question + 3] = encode(f"ask K{needle.key} ?")
    ids[-1] = TOKEN_ID["->"]
    return NeedlePrompt(
        token_ids=ids.tolist(),
        answer=needle.answer,
        needle=needle,
        distractors=distractors,
        tag=needle.tag,
        asked_key_position=question + 1,
        header_range=_header_range(last_chunk),
    )


def usable_length(num_tokens: int, ask_gap: int = 24) -> int:
    """The largest length up to ``num_tokens`` that ``make_prompt`` accepts; ``ValueError`` when there is none."""
    for length in range(num_tokens, max(num_tokens - CHUNK_TOKENS, 0), -1):
        if _misfit(length, ask_gap) is None:
            return length
    raise ValueError(f"no prompt of up to {num_tokens} tokens holds a needle and a question with ask_gap {ask_gap}")


def _misfit(num_tokens: int, ask_gap: int) -> str | None:
    """Why a prompt of this shape cannot be laid out, or None; raises ``ValueError`` for a gap that never fits."""
    if not MIN_ASK_GAP <= ask_gap <= MAX_ASK_GAP:
        raise ValueError(f"ask_gap must be in [{MIN_ASK_GAP}, {MAX_ASK_GAP}], got {ask_gap}")
    question = num_tokens - ask_gap - _QUESTION_TOKENS
    if not _legal_starts(0, question):
        return f"{num_tokens} tokens leave no room for a needle before the question"
    last_fed = num_tokens - 1 + DIGITS_PER_ANSWER  # the full stop is generated, never fed back
    border = last_fed - last_fed % CHUNK_TOKENS
    if question < border + _HEAD_MARGIN:
        return f"with {num_tokens} tokens the chunk that starts at token {border} would cut the question or its answer"
    return None


def _neighbours(num_tokens: int, ask_gap: int) -> str:
    """The usable lengths just below and above an unusable one, for an error message."""
    above = next(n for n in range(max(num_tokens, 1), max(num_tokens, 1) + CHUNK_TOKENS) if _misfit(n, ask_gap) is None)
    try:
        return f"{usable_length(num_tokens, ask_gap)} and {above}"
    except ValueError:
        return f"{above} and more"


def _header_range(chunk: int) -> range:
    """``page section S#`` of a chunk; in the first it follows ``<bos>``."""
    start = chunk * CHUNK_TOKENS if chunk else 1
    return range(start, start + 3)


def _legal_starts(chunk: int, question: int) -> range:
    """Where a fact may start in ``chunk``, so that it keeps its distance from the chunk's ends and the question."""
    end = min((chunk + 1) * CHUNK_TOKENS, question)
    return range(chunk * CHUNK_TOKENS + _HEAD_MARGIN, end - _TAIL_MARGIN - NEEDLE_TOKENS + 1)


def _place(depth: float, question: int) -> int:
    """The legal start nearest to ``depth`` of the document."""
    wanted = round(depth * question)
    chunk = min(wanted, question - 1) // CHUNK_TOKENS
    legal = _legal_starts(chunk, question) or _legal_starts(chunk - 1, question)
    return min(max(wanted, legal[0]), legal[-1])


def _chunk_tags(rng: np.random.Generator, needle_chunk: int, last_chunk: int) -> np.ndarray:
    """int [last_chunk + 1]: one tag for the needle's chunk and the last, others for the rest, repeating after 63."""
    shuffled = rng.permutation(NUM_TAGS)
    tags = np.resize(shuffled[1:], last_chunk + 1)
    tags[[needle_chunk, last_chunk]] = shuffled[0]
    return tags


def _distractors(rng: np.random.Generator, needle: Needle, tags: np.ndarray, question: int) -> tuple[Needle, ...]:
    """Up to three facts a chunk, spaced out, no (tag, key) twice; most have the needle's key if their tag allows."""
    used = {(needle.tag, needle.key)}
    found = []
    for chunk, tag in enumerate(tags.tolist()):
        legal = _legal_starts(chunk, question)
        taken = [needle.start]
        for start in rng.integers(legal.start, legal.stop, DISTRACTORS_PER_CHUNK).tolist() if legal else ():
            if any(abs(start - other) < _SPACING for other in taken):
                continue
            taken.append(start)
            key = needle.key if rng.random() < SAME_KEY_SHARE else int(rng.integers(NUM_KEYS))
            while (tag, key) in used:
                key = int(rng.integers(NUM_KEYS))
            used.add((tag, key))
            found.append(Needle(start, tag, key, _digits(rng)))
    return tuple(sorted(found, key=lambda fact: fact.start))


def _digits(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(0, len(DIGIT_IDS), DIGITS_PER_ANSWER).tolist())
