"""The incident of vllm#42085 with its own model: DeepSeek-V4-Flash at full size, 7.13 GiB of KV, prompts of 90k."""

from __future__ import annotations

from typing import Any

import inside
import pytest
from accounts import check_free_lists, transfers
from core.driving import STORE, Serving, prompt, scheduled
from hosted import device_forgets
from transformers import AutoConfig

from kvtier import CacheSpec

TOKENS = 90_112
FLASH = {"compress_ratios": [0, 0, *[4, 128] * 20, 4], "dtype": "bfloat16"}


@pytest.fixture
def flash(make_serving: Any) -> Any:
    """A function that makes a cache of V4-Flash's groups which keeps books only."""
    spec = CacheSpec.from_config(AutoConfig.for_model("deepseek_v4", **FLASH))

    def make(**options: Any) -> Serving:
        limits = {"max_batched_tokens": 16_384, "max_running": 4, "audit_every": 8}
        sizes = {"device_bytes": "7.13GiB", "host_bytes": "16GiB"}
        return make_serving(spec, None, device="meta", scheduler=limits, **sizes, **options)

    return make


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a1_vllm_42085_with_its_own_model(flash: Any, store: str) -> None:
    """The second prompt ran into an assertion of the allocator, while stores of the first were under way."""
    serving = flash(hold=[STORE], store=store)
    serving.add("first", prompt(0, TOKENS), 4)
    sizes = []
    while "first" not in serving.finished:
        sizes.append(scheduled(serving.step()).get("first", 0))
    assert sizes[:5] == [16_384] * 5, "nothing was to be in the way of whole steps"
    serving.add("second", prompt(1, TOKENS), 4)
    serving.steps_until(lambda: "second" in serving.finished, limit=40)
    for name in ("first", "second"):
        done = serving.finished[name]
        assert (done.finish_reason, done.preemptions, len(done.token_ids)) == ("length", 0, 4)
    if store == "eager":
        assert transfers(serving, STORE), "the stores were to be under way all the while"
    for transfer in transfers(serving, STORE):
        named = set(zip(transfer.groups.tolist(), transfer.device.tolist(), strict=True))
        assert len(named) == len(transfer.groups), "a block was named twice"
    serving.engine.release()
    serving.run()
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        assert not pools.arrays.refs.any()
        check_free_lists(pools)


def test_a1_hits_of_deepseek_v4_are_whole_in_every_place_of_a_layer(flash: Any) -> None:
    """Windows, entries, index keys and rows: a hit is where all of them are, on the device or in the host tier."""
    serving, text = flash(hold=[]), prompt(0, TOKENS)
    serving.serve("first", text, 4)
    kept = {name: pool.cached for name, pool in serving.cache.stats().host.items()}
    assert kept["entries_4"] == kept["index_4"] == kept["entries_128"] == TOKENS // 128
    assert kept["rows_128"] == 0, "at a multiple of 128 no row waits for its entry"
    assert serving.serve("again", text, 4).cached_tokens == {"device": TOKENS - 128, "host": 0}
    assert serving.serve("goes on", [*text, *prompt(9, 500)], 4).cached_tokens == {"device": TOKENS, "host": 0}
    assert serving.serve("parts", [*text[:50_000], *prompt(8, 500)], 4).cached_tokens["device"] % 128 == 0
    assert serving.serve("parts there again", [*text[:50_000], *prompt(7, 500)], 4).cached_tokens["device"] == 49_920
    device_forgets(serving)
    assert serving.serve("from the host", text, 4).cached_tokens == {"device": 0, "host": TOKENS - 128}
    assert {"preemptions": 0}.items() <= serving.cache.stats().requests.items()
