"""One story of prompts and answers, told to every door: they find the same, learn the same of ends, and offer the same
to a remote tier.

The doors are a scheduler, a manager for an engine that schedules itself, a host tier, and one in two halves.
"""

from __future__ import annotations

from collections.abc import Iterable

import inside
import numpy as np
import pytest
from breadth import sized
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from core.driving import prompt
from core.outside import GROUPS, Outside
from core.test_relayed_books import Relayed
from kvtier import CacheManager, Request
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.coordinator.door import RemoteDoor
from kvtier.coordinator.step import Step
from kvtier.geometry.keys import KeyArray
from kvtier.testing import canary_spec

SPEC = canary_spec({name: (attention, tokens) for name, (attention, tokens, _) in GROUPS.items()})
ASKS = st.lists(
    st.tuples(
        st.integers(0, 5),  # the text that it goes on from, counted from the last; there may be none
        st.sampled_from([0, 0, 0, 1, 3, 9]),  # tokens of its end that are dropped
        st.booleans(),  # its answer is dropped
        st.integers(1, 12),  # new tokens
        st.integers(1, 14),  # of the answer
    ),
    min_size=2,
    max_size=12,
)
MOST_TOKENS = 96


@pytest.mark.usefixtures("unaudited")
@given(ASKS)
@settings(max_examples=sized(8, 300), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_all_doors_give_one_answer(make_serving, make_cache, asks) -> None:
    pays, offered = Boundaries.pays, dict[int, list[int]]()

    def offer(door: RemoteDoor, keys: KeyArray, boundaries: Iterable[int], seek: object) -> None:
        offered.setdefault(id(door), []).extend(sorted(boundaries))

    with pytest.MonkeyPatch.context() as patch:  # what windows pass stays on a device
        patch.setattr(Boundaries, "pays", lambda self, end, app=None: end is not End.PASSED and pays(self, end, app))
        patch.setattr(RemoteDoor, "offer", offer)
        serving, manager = make_serving(SPEC, 400, 400), CacheManager(make_cache(SPEC, 400), 512, 4)
        tier, relayed = Outside(host_memory=400_000), Relayed(host_memory=400_000, workers=1)
        doors = [inside.keeping(manager), inside.tier_keeping(tier.tier), inside.tier_keeping(relayed.tier)]
        mine = inside.keeping(serving.cache)
        texts: list[tuple[list[int], list[int]]] = []
        for k, (back, cut, drops, new, answer) in enumerate(asks):
            begin: list[int] = []
            if back < len(texts):
                tokens, said = texts[-1 - back]
                begin = tokens if drops else [*tokens, *said]
                begin = begin[: len(begin) - cut]
            tokens = [*begin, *prompt(100 + k, new)][-MOST_TOKENS:] if len(begin) + new <= MOST_TOKENS else prompt(k, 9)
            offered.clear()
            done = serving.serve(f"{k}", tokens, answer)
            said = list(done.token_ids)
            there = done.cached_tokens["device"]
            assert served(manager, f"{k}", tokens, said) == there
            found = tier.serve(tokens, said[:-1])  # the last token is never computed
            assert relayed.serve(tokens, said[:-1]) == found
            if found != there:
                assert found < there, "blocks of two ends' windows may be a third one's: a device has kept them all"
                break  # from here on they have seen two stories
            for theirs in doors:
                assert mine.boundaries._credits == theirs.boundaries._credits, k
                assert [*mine.boundaries._apps.values()] == [*theirs.boundaries._apps.values()], k
                for learned in "_prompt", "_end", "_common", "_stem", "_lent", "_is_used":
                    assert np.array_equal(getattr(mine.returns, learned), getattr(theirs.returns, learned)), learned
            told = [{*boundaries} - {0, there} for boundaries in offered.values()]
            assert len(told) == 3 and told[0] == told[1] == told[2], "what they offer to a remote tier"
            texts.append((tokens, said))
        serving.cache.close()


def served(manager: CacheManager, name: str, tokens: list[int], said: list[int]) -> int:
    """A request whose answer is told; returns the tokens found."""
    sequence = manager.open(Request(name, tokens, len(said)))
    assert manager.start(sequence) is None
    found = sequence.num_computed
    for token in said:
        step = manager.plan([(sequence, sequence.num_tokens - sequence.num_computed)])
        assert isinstance(step, Step), step
        manager.commit(step, [token])
    return found
