"""One story of prompts and answers, told to a scheduler's cache and to a host tier for another engine: they find the
same and learn the same of ends."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sized
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from core.driving import prompt
from core.outside import GROUPS, Outside
from kvtier.coordinator.boundaries import Boundaries, End
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
def test_all_doors_give_one_answer(make_serving, asks) -> None:
    pays = Boundaries.pays
    with pytest.MonkeyPatch.context() as patch:  # what windows pass stays on a device
        patch.setattr(Boundaries, "pays", lambda self, end: end is not End.PASSED and pays(self, end))
        serving, engine = make_serving(SPEC, 400), Outside(host_memory=400_000)
        texts: list[tuple[list[int], list[int]]] = []
        for k, (back, cut, drops, new, answer) in enumerate(asks):
            begin: list[int] = []
            if back < len(texts):
                tokens, said = texts[-1 - back]
                begin = tokens if drops else [*tokens, *said]
                begin = begin[: len(begin) - cut]
            tokens = [*begin, *prompt(100 + k, new)][-MOST_TOKENS:] if len(begin) + new <= MOST_TOKENS else prompt(k, 9)
            done = serving.serve(f"{k}", tokens, answer)
            said = list(done.token_ids)
            found = engine.serve(tokens, said[:-1])  # the last token is never computed
            there = done.cached_tokens["device"]
            if found != there:
                assert found < there, "blocks of two ends' windows may be a third one's: a device has kept them all"
                break  # from here on they have seen two stories
            mine, theirs = inside.boundaries(serving.cache), inside.tier_boundaries(engine.tier)
            assert mine._credits == theirs._credits, k
            mine, theirs = inside.returns(serving.cache), inside.tier_returns(engine.tier)
            for learned in "_prompt", "_end", "_common", "_stem", "_lent", "_is_used":
                assert np.array_equal(getattr(mine, learned), getattr(theirs, learned)), (k, learned)
            texts.append((tokens, said))
        serving.cache.close()
