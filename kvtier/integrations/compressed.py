"""Models that look beyond their window through compressed entries (DeepSeek-V4): what each layer keeps.

Every layer has a window of keys, which are its values too. Beside it a layer of compressed sparse attention has one
entry for a few tokens, and one key for an index of the entries. A heavily compressed one has entries of many tokens
alone. An entry is made of *rows*, one of each token. Those of the entry to come are kept, and if entries overlap, those
of the one before it.

Promises   a hit needs the window, all entries and index keys, and the rows that the next entry is made of. Of entries
           that overlap with none, it needs no rows at a multiple of their tokens.
Does not   import transformers or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.geometry.kinds import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.geometry.roles import Place
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.errors import ConfigError, UnsupportedModel
from kvtier.machine.integers import integer, shown

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
COMPRESSED_TYPES = (SPARSE, HEAVY)


def compressed_spec(text: Any, types: Sequence[str], dtype: Any, block_tokens: int) -> CacheSpec:
    """The groups of such a model, ``types`` by layer. Raises ``UnsupportedModel`` and ``ConfigError``.

    Blocks of entries are as long as a hit: the least common multiple of ``block_tokens`` and the tokens of all entries.
    """
    if odd := next((name for name in types if name not in (*COMPRESSED_TYPES, "sliding_attention")), None):
        raise UnsupportedModel(f"{text.model_type}: kvtier knows no {odd!r} beside layers of compressed entries")
    if DTYPE_BYTES[dtype_name(dtype, "dtype")] == 1:
        raise UnsupportedModel(
            f"{text.model_type}: in 8 bits each of its entries has scales of its own, and kvtier's are by layer and "
            "head; keep them in bfloat16"
        )
    if (heads := getattr(text, "num_key_value_heads", 1)) != 1:
        raise UnsupportedModel(f"{text.model_type}: its entries have {shown(heads)} KV heads; kvtier knows one")
    rates = {name: _rate(text, name) for name in COMPRESSED_TYPES if name in types}
    long = math.lcm(block_tokens, *rates.values())
    layers: list[dict[str, Place]] = [{} for _ in types]
    groups = []

    def add(role: str, name: str, at: Sequence[int], attention: Any, *sizes: Any, **more: Any) -> None:
        groups.append(GroupSpec(name, attention, len(at), 1, *sizes, **more))
        for index, i in enumerate(at):
            layers[i][role] = name, index

    window = SlidingWindow(text.sliding_window)
    add("kv", "sliding", range(len(types)), window, text.head_dim, dtype, block_tokens, 0)
    for kind, rate in rates.items():
        at = [i for i, name in enumerate(types) if name == kind]
        whole: Mapping[str, Any] = {"entry_tokens": rate}
        add("entries", f"entries_{rate}", at, FullAttention(), text.head_dim, dtype, long, 0, **whole)
        if kind == HEAVY:
            short = math.gcd(block_tokens, rate)
            add("rows", f"rows_{rate}", at, ChunkedLocal(rate), text.head_dim, dtype, short)
            continue
        add("index", f"index_{rate}", at, FullAttention(), text.index_head_dim, dtype, long, 0, **whole)
        size = 2 * (text.head_dim + text.index_head_dim)  # for an entry and the one after it
        short = math.gcd(block_tokens, 2 * rate)
        add("rows", f"rows_{rate}", at, SlidingWindow(2 * rate), size, dtype, short)
    return CacheSpec(groups, layers=layers)


def _rate(text: Any, layer_type: str) -> int:
    """Tokens of an entry of such layers."""
    rates = getattr(text, "compress_rates", None)
    rate = integer(rates.get(layer_type)) if isinstance(rates, Mapping) else None
    if rate is None or rate < 2:
        raise ConfigError(
            f"{text.model_type}: compress_rates must name a number of tokens for {layer_type!r}, got {shown(rates)}"
        )
    return rate
