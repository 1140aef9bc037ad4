"""The needle model's 461 words, their token ids, and its tokenizer.

Text is words separated by single spaces, one token each, so ids and text are two spellings of one thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

NUM_KEYS = 256
NUM_TAGS = 64
NUM_FILLERS = 120
DIGITS_PER_ANSWER = 5

BOS_WORD, EOS_WORD, UNKNOWN_WORD, FALLBACK_WORD = "<bos>", ".", "unknown", "<unk>"
WORDS: tuple[str, ...] = (
    *(BOS_WORD, EOS_WORD, FALLBACK_WORD, "page", "section", "key", "=", "ask", "?", "->", UNKNOWN_WORD),
    *(str(digit) for digit in range(10)),
    *(f"K{key}" for key in range(NUM_KEYS)),
    *(f"S{tag}" for tag in range(NUM_TAGS)),
    *(f"w{filler}" for filler in range(NUM_FILLERS)),
)
TOKEN_ID: dict[str, int] = {word: token_id for token_id, word in enumerate(WORDS)}
DIGIT_IDS = range(TOKEN_ID["0"], TOKEN_ID["0"] + 10)
KEY_IDS = range(TOKEN_ID["K0"], TOKEN_ID["K0"] + NUM_KEYS)
TAG_IDS = range(TOKEN_ID["S0"], TOKEN_ID["S0"] + NUM_TAGS)
FILLER_IDS = range(TOKEN_ID["w0"], TOKEN_ID["w0"] + NUM_FILLERS)

CHAT_TEMPLATE = """\
{%- if not messages[0].content.startswith('<bos>') %}{{ '<bos> page section S0' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' %}{{ ' -> ' + message.content.removesuffix('.').strip() + ' .' -}}
{%- else %}{{ ('' if loop.first and message.content.startswith('<bos>') else ' ') + \
message.content.strip().removesuffix('->').strip() }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ ' ->' }}{% endif -%}
"""
"""Opens a page if the first message does not, and asks for the answer with an arrow. A content that holds a whole
prompt of its own, arrow included, passes through unchanged."""


def encode(text: str) -> list[int]:
    """Token ids of words that are all in the vocabulary; raises ``KeyError`` with the first that is not."""
    return [TOKEN_ID[word] for word in text.split()]


def decode(token_ids: Iterable[int]) -> str:
    """The words of ``token_ids``, separated by single spaces."""
    return " ".join(WORDS[token_id] for token_id in token_ids)


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, from which ``AutoTokenizer`` loads.

    The prompt spells out its ``<bos>``: encoding adds nothing. Words outside the vocabulary become ``<unk>``.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=FALLBACK_WORD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = (BOS_WORD, EOS_WORD, FALLBACK_WORD)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_WORD,
        "eos_token": EOS_WORD,
        "pad_token": EOS_WORD,
        "unk_token": FALLBACK_WORD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
