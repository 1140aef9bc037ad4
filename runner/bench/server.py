"""What the server tells about itself, and a request that shows whether it takes ours."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.machine.errors import ConfigError
from runner.bench import told
from runner.bench.client import Answer, Client
from runner.bench.record import Record

_RETRY_S = 0.5


@dataclass(frozen=True)
class ServerFacts:
    """None: it does not tell."""

    base_url: str
    model: str
    served_models: tuple[str, ...] = ()
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    software: str | None = None
    """The server's ``Server`` header."""

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values for JSON."""
        return asdict(self) | {"served_models": list(self.served_models)}


async def look(client: Client, model: str | None, patience_s: float) -> ServerFacts:
    """Asks /v1/models and /version, for ``patience_s`` until the server is there.

    Raises ``ConfigError`` if it is not, and if it does not serve ``model``; without one its first is taken.
    """
    status, data, software = await _models(client, patience_s)
    cards = data.get("data") if isinstance(data, dict) else None
    if 300 <= status < 400:
        raise ConfigError(f"the server answers /v1/models with {status}: {data}; give its own address as --base-url")
    if status in (401, 403):
        raise ConfigError(f"the server answers {status}: it wants an API key (--api-key)")
    if status != 200 or not isinstance(cards, list):
        if model is None:
            raise ConfigError(f"the server answers /v1/models with {status}: say which model it serves with --model")
        cards = []
    cards = [card for card in cards if isinstance(card, dict) and told.text(card.get("id"))]
    names = tuple(card["id"] for card in cards)
    if model is None and not names:
        raise ConfigError("the server lists no model: say which one it serves with --model")
    model = names[0] if model is None else model
    if names and model not in names:
        raise ConfigError(f"the server does not serve {model!r}, but {', '.join(map(repr, names))}")
    card: dict[str, Any] = next((card for card in cards if card["id"] == model), {})
    return ServerFacts(
        client.target.base_url,
        model,
        names,
        told.text(card.get("owned_by")),
        told.text(card.get("root")),
        told.count(card.get("max_model_len")) or None,
        await _version(client),
        software or None,
    )


async def _models(client: Client, patience_s: float) -> tuple[int, Any, str]:
    end_s = time.monotonic() + patience_s
    while True:
        try:
            found = await client.call("/v1/models")
            if found[0] < 500 or time.monotonic() >= end_s:
                return found
        except ConfigError:
            if time.monotonic() >= end_s:
                raise
        await asyncio.sleep(_RETRY_S)


async def _version(client: Client) -> str | None:
    status, data, _ = await client.call("/version")
    return told.text(data.get("version")) if status == 200 and isinstance(data, dict) else None


async def probe(client: Client, body: bytes) -> Answer:
    """Sends one small request before any that counts; raises ``ConfigError`` with what the server says against it."""
    record = Record(-1, 0, 0, 0, 0.0, is_open=False)
    answer = await client.send(body, record)
    if not record.is_ok:
        raise ConfigError(
            f"the server does not take requests of this form ({record.outcome.value}: {record.error}); see "
            "--endpoint, --prompt-form, --ignore-eos and --extra-body"
        )
    return answer
