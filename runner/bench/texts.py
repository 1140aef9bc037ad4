"""Text to token ids and back: by the server's /tokenize and /detokenize, or by a tokenizer.json here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvtier.machine.errors import ConfigError
from runner.bench import told
from runner.bench.client import Client

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they  "
    "which one you were all her she there would their we him been has when who will no more if out so up said  "
    "what its about than into them can only other time new some could these two may first then do any like my  "
    "now over such our man me even most made after also did many off before must well back through years  "
    "where much your way down should because long each just state those people too mr how little good world  "
    "make very year still see work life being under three never day same another know while last might us  "
    "great old go come since against right came take used himself few house use place during without again  "
    "home around small however found page section key ask number part water sound light river tree stone  "
    "paper letter garden morning window street market music table colour winter 0 1 2 3 4 5 6 7 8 9"
)
"""English words and digits, from which prompts are made if the server's own token ids are not known otherwise."""
_ROUNDS = 4


class Texts(Protocol):
    """A tokenizer. Special tokens are neither added nor looked for, but for a server's own habits."""

    source: str

    async def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""


class ServerTexts:
    """The server's own; vLLM and kvtier have it."""

    source = "the server's /tokenize"

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model

    async def encode(self, text: str) -> list[int]:
        """See ``Texts``."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        found = told.ids(await self._ask("/tokenize", body, "tokens"))
        if found is None:
            raise ConfigError("the server answers /tokenize with no token ids: give --tokenizer PATH, or --token-ids")
        return found

    async def decode(self, ids: Sequence[int]) -> str:
        """See ``Texts``."""
        found = await self._ask("/detokenize", {"model": self._model, "tokens": list(ids)}, "prompt")
        if not isinstance(found, str):
            raise ConfigError("the server answers /detokenize with no text: give --tokenizer PATH")
        return found

    async def _ask(self, path: str, body: dict[str, Any], name: str) -> Any:
        status, data, _ = await self._client.call(path, body)
        if status != 200 or not isinstance(data, dict) or name not in data:
            raise ConfigError(
                f"the server has no {path} that could be used (status {status}): give --tokenizer PATH, or with "
                "prompts of token ids --token-ids FIRST:LAST"
            )
        return data[name]


class LocalTexts:
    """A tokenizer.json, or a folder with one."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises Exception itself
            raise ConfigError(f"--tokenizer {path}: {file} cannot be read ({problem})") from problem
        self.source = f"--tokenizer {path}"

    async def encode(self, text: str) -> list[int]:
        """See ``Texts``."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def decode(self, ids: Sequence[int]) -> str:
        """See ``Texts``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


async def ids_of_words(texts: Texts) -> list[int]:
    """Token ids that the model certainly has, and that no special token is: those of ordinary words."""
    return await texts.encode(WORDS)


async def text_of(texts: Texts, ids: Sequence[int], filler: Sequence[int]) -> tuple[str, int]:
    """(A text that begins as ``ids`` do, its tokens), of as many tokens as ``ids`` if a few tries suffice.

    Text does not always become the tokens that it was made of. Its end is cut, or lengthened with ``filler``.
    """
    wanted, tried = len(ids), list(ids)
    best: tuple[str, int] | None = None
    for _ in range(_ROUNDS):
        text = await texts.decode(tried)
        found = await texts.encode(text)
        if best is None or abs(len(found) - wanted) < abs(best[1] - wanted):
            best = text, len(found)
        if len(found) == wanted:
            break
        missing = wanted - len(found)
        tried = found[:wanted] if missing < 0 else found + [filler[i % len(filler)] for i in range(missing)]
    assert best is not None
    return best
