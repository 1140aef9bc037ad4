"""Construct the needle model's weights from a seed; nothing is trained. ``python -m runner.needle.build --out DIR``.

A prompt has ``page section S9`` at the head of every chunk, and somewhere ``key K17 = 4 7 1 9 3 .``. At the end it has
``ask K17 ? ... ->``. The model answers ``4 7 1 9 3 .`` if KV of every kind tells it which digit is due:

- S1 (sliding; head t looks t tokens back): a digit learns its key and its slot (its place after ``=``). An answer
  token learns the slot that is due (its distance from ``->``).
- C (chunked): every token learns its section's tag, from the header in its own chunk.
- S2 (sliding): every token learns the key asked last.
- F (full): a value whose key, tag and slot all match scores 320. The sink on ``<bos>``, which says ``unknown``,
  scores 288, and anything with one part wrong at most 256: half an answer is never given.

A constructed KV is mostly zeros, and permuting it inside a full group changes nothing. So the dimensions of K and V
without a reader carry noise made of the token and its neighbours. So every block has its own bytes to compare.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from runner.needle.config import NeedleConfig
from runner.needle.vocabulary import (
    DIGIT_IDS,
    EOS_WORD,
    KEY_IDS,
    NUM_KEYS,
    NUM_TAGS,
    TAG_IDS,
    TOKEN_ID,
    UNKNOWN_WORD,
    write_tokenizer,
)

Matrix = NDArray[np.float32]

SHIFTS = 8
"""Query heads of S1, one per distance."""
SLOTS = 6
"""Answer tokens: five digits and the full stop."""
KEY, TAG, VALUE, RANDOM = 32, 16, 32, 12
"""Widths of a key's code, a tag's code, a one-hot answer word, a token's noise."""

WIDTHS = {
    # written by the embedding
    "one": 1, "key": KEY, "tag": TAG, "is_tag": 1, "value": VALUE, "is_eq": 1, "is_ask": 1, "is_arrow": 1,
    "is_bos": 1, "is_unknown": 1, "random": RANDOM,
    # written by S1
    "near_key": KEY, "slot": SLOTS, "due_slot": SLOTS, "after_ask": 1, "near_random": RANDOM,
    # written by C, S2 and F
    "section": TAG, "asked_key": KEY, "out": VALUE,
}  # fmt: skip
RESIDUAL = {
    name: slice(end - width, end)
    for (name, width), end in zip(WIDTHS.items(), accumulate(WIDTHS.values()), strict=True)
}
"""Where each quantity lies in the residual stream."""
VALUE_INDEX = {
    **{token_id: i for i, token_id in enumerate(DIGIT_IDS)},
    TOKEN_ID[EOS_WORD]: len(DIGIT_IDS),
    TOKEN_ID[UNKNOWN_WORD]: len(DIGIT_IDS) + 1,
}
"""Answer word -> its index in ``value`` and ``out``."""


class Layer:
    """The four matrices of one attention layer, float32, all zero at first; weight[output, input] as in nn.Linear."""

    def __init__(self, config: NeedleConfig, layer_idx: int) -> None:
        hidden, self.head_dim = config.hidden_size, config.head_dim
        width = config.num_attention_heads_per_layer[layer_idx] * self.head_dim
        self.q: Matrix = np.zeros((width, hidden), np.float32)
        self.k: Matrix = np.zeros((self.head_dim, hidden), np.float32)
        self.v: Matrix = np.zeros((self.head_dim, hidden), np.float32)
        self.o: Matrix = np.zeros((hidden, width), np.float32)

    def project(self, weight: Matrix, source: str, first_dim: int, gain: float = 1.0) -> None:
        """Copy residual quantity ``source``, times ``gain``, to ``weight``'s output dimensions from ``first_dim``."""
        width = WIDTHS[source]
        weight[first_dim : first_dim + width, RESIDUAL[source]] = gain * np.eye(width)

    def emit(self, first_dim: int, target: str, head: int = 0, offset: int = 0, width: int | None = None) -> None:
        """Add what ``head`` gathered from ``first_dim`` on to ``width`` dimensions of ``target``, from ``offset``."""
        width = WIDTHS[target] if width is None else width
        row, column = RESIDUAL[target].start + offset, head * self.head_dim + first_dim
        self.o[row : row + width, column : column + width] = np.eye(width)

    def add_noise(self, rng: np.random.Generator, read_by_key: set[int], read_by_value: set[int]) -> None:
        """Fill every dimension of K and V outside the read ones with a projection of the tokens' noise."""
        for weight, read in ((self.k, read_by_key), (self.v, read_by_value)):
            unread = sorted(set(range(self.head_dim)) - read)
            for source in ("random", "near_random"):
                weight[unread, RESIDUAL[source]] = rng.standard_normal((len(unread), RANDOM)) / 4

    def tensors(self, layer_idx: int) -> dict[str, Matrix]:
        """The matrices under their names in the checkpoint."""
        return {f"model.layers.{layer_idx}.self_attn.{name}_proj.weight": getattr(self, name) for name in "qkvo"}


def shift_layer(config: NeedleConfig, rng: np.random.Generator) -> Layer:
    """S1: head t gathers the token t back. Rotary phases align at that distance: it scores 512, its neighbours 479."""
    layer = Layer(config, 0)
    angle = rotary_frequencies(config)
    pairs = len(angle)
    one = RESIDUAL["one"].start
    layer.k[:pairs, one] = 16
    for t in range(SHIFTS):
        first = t * layer.head_dim
        layer.q[first : first + pairs, one] = 16 * np.cos(angle * t)
        layer.q[first + pairs : first + 2 * pairs, one] = -16 * np.sin(angle * t)
    for source, dim in (("key", 0), ("is_eq", 32), ("is_ask", 33), ("is_arrow", 34), ("random", 40)):
        layer.project(layer.v, source, dim)
    for t in range(2, SHIFTS):
        layer.emit(0, "near_key", head=t)
    for slot in range(SLOTS):
        layer.emit(32, "slot", head=slot + 1, offset=slot, width=1)
        layer.emit(34, "due_slot", head=slot, offset=slot, width=1)
    layer.emit(33, "after_ask", head=1)
    for t in (1, 3, 5, 7):
        columns = slice(t * layer.head_dim + 40, t * layer.head_dim + 40 + RANDOM)
        layer.o[RESIDUAL["near_random"], columns] = rng.standard_normal((RANDOM, RANDOM)) / 4
    layer.add_noise(rng, set(range(2 * pairs)), {*range(35), *range(40, 40 + RANDOM)})
    return layer


def section_layer(config: NeedleConfig, rng: np.random.Generator) -> Layer:
    """C: the tag token of the current chunk scores 32, all others 0."""
    layer = Layer(config, 1)
    layer.project(layer.q, "one", 0, 16)
    layer.project(layer.k, "is_tag", 0, 16)
    layer.project(layer.v, "tag", 0)
    layer.emit(0, "section")
    layer.add_noise(rng, {0}, set(range(TAG)))
    return layer


def asked_key_layer(config: NeedleConfig, rng: np.random.Generator) -> Layer:
    """S2, head 0 of as many as S1 has: tokens after ``ask`` score 512, and among these the newest scores highest.

    The slowest rotary pair turns by less than pi - 0.4 over the window, so its score falls with distance throughout.
    """
    layer = Layer(config, 2)
    pairs = len(rotary_frequencies(config))
    layer.project(layer.q, "one", 40, 64)
    layer.project(layer.k, "after_ask", 40, 64)
    layer.project(layer.q, "one", pairs - 1, 32 * np.cos(0.4))
    layer.project(layer.q, "one", 2 * pairs - 1, 32 * np.sin(0.4))
    layer.project(layer.k, "one", pairs - 1, 32)
    layer.project(layer.v, "key", 0)
    layer.emit(0, "asked_key")
    layer.add_noise(rng, {pairs - 1, 2 * pairs - 1, 40}, set(range(KEY)))
    return layer


def lookup_layer(config: NeedleConfig, rng: np.random.Generator) -> Layer:
    """F: key 128 + tag 128 + slot 64 at a full match, against the sink's 288."""
    layer = Layer(config, 3)
    for asked, held, dim, gain in (
        ("asked_key", "near_key", 0, 32),
        ("section", "section", 32, 64),
        ("due_slot", "slot", 48, 512),
        ("one", "is_bos", 63, 2304),
    ):
        layer.project(layer.q, asked, dim, gain)
        layer.project(layer.k, held, dim)
    layer.project(layer.v, "value", 0)
    layer.emit(0, "out")
    layer.add_noise(rng, {*range(48 + SLOTS), 63}, set(range(VALUE)))
    return layer


def embeddings(config: NeedleConfig, rng: np.random.Generator) -> Matrix:
    """[vocab, hidden]: what each word is. Wrong keys agree with a key by 16 of 32 at most, wrong tags by 8 of 16."""
    table = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    table[:, RESIDUAL["one"]] = 1
    table[:, RESIDUAL["random"]] = rng.standard_normal((config.vocab_size, RANDOM))
    table[KEY_IDS, RESIDUAL["key"]] = sign_codes(rng, NUM_KEYS, KEY, largest_dot=16)
    table[TAG_IDS, RESIDUAL["tag"]] = sign_codes(rng, NUM_TAGS, TAG, largest_dot=8)
    table[TAG_IDS, RESIDUAL["is_tag"]] = 1
    flags = {"=": "is_eq", "ask": "is_ask", "->": "is_arrow", "<bos>": "is_bos", UNKNOWN_WORD: "is_unknown"}
    for word, flag in flags.items():
        table[TOKEN_ID[word], RESIDUAL[flag]] = 1
    for token_id, index in VALUE_INDEX.items():
        table[token_id, RESIDUAL["value"].start + index] = 1
    table[TOKEN_ID["<bos>"], RESIDUAL["value"]] = table[TOKEN_ID[UNKNOWN_WORD], RESIDUAL["value"]]
    return table


def head(config: NeedleConfig) -> Matrix:
    """[vocab, hidden]: the word found, 16; ``unknown`` where nothing was, 2; and after ``unknown`` the full stop."""
    table = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    for token_id, index in VALUE_INDEX.items():
        table[token_id, RESIDUAL["out"].start + index] = 16
    table[TOKEN_ID[UNKNOWN_WORD], RESIDUAL["one"]] = 2
    table[TOKEN_ID[EOS_WORD], RESIDUAL["is_unknown"]] = 64
    return table


def rotary_frequencies(config: NeedleConfig) -> NDArray[np.float64]:
    """Radians per token of each rotary pair, as ``modeling.rotary_embedding`` has them."""
    return config.rope_parameters["rope_theta"] ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)


def sign_codes(rng: np.random.Generator, count: int, bits: int, largest_dot: int) -> Matrix:
    """[count, bits] of +-1, drawn one by one, each kept if its dot product with every earlier one is small enough."""
    codes = np.zeros((0, bits), np.float32)
    while len(codes) < count:
        code = 2.0 * rng.integers(0, 2, bits) - 1
        if np.all(codes @ code <= largest_dot):
            codes = np.vstack((codes, code))
    return codes.astype(np.float32)


def build_weights(config: NeedleConfig, seed: int) -> dict[str, Matrix]:
    """Every tensor of the checkpoint, float32; the same bits for the same seed."""
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": embeddings(config, rng), "lm_head.weight": head(config)}
    for layer_idx, build in enumerate((shift_layer, section_layer, asked_key_layer, lookup_layer)):
        tensors |= build(config, rng).tensors(layer_idx)
    return tensors


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write weights, config and tokenizer to ``folder``, the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = NeedleConfig()
    (folder / "model.safetensors").write_bytes(save(build_weights(config, seed), metadata={"format": "pt"}))
    fields = {name: getattr(config, name) for name in NeedleConfig.__annotations__}
    identity = {"architectures": ["NeedleForCausalLM"], "model_type": config.model_type, "dtype": "float32"}
    _write_json(folder / "config.json", identity | fields)
    tokens = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"do_sample": False, "max_new_tokens": 8} | tokens)
    write_tokenizer(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runner.needle.build", description="Build the needle checkpoint.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
