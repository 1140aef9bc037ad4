"""``LLM`` tells routers what its cache has: the longest prefix that a listener knows is the hit of the next turn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
from patience import PATIENCE_S

from kvtier import ConfigError
from runner import LLM, SamplingParams
from runner.needle import make_prompt, weights_path

SMALL = {"full": 200, "sliding": 120, "chunked": 160}
ON = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
BT = 16


class Listener:
    """Prefixes that it was told of, by their tokens."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._paths: dict[int, tuple[int, ...]] = {}
        self.found: set[tuple[int, ...]] = set()
        self.media: dict[tuple[int, ...], str] = {}

    def hear_of(self, tokens: tuple[int, ...]) -> None:
        """Until it knows that this prefix is there."""
        while tokens not in self.found:
            for event in msgspec.msgpack.decode(self._socket.recv_multipart()[2])[1]:
                if event["type"] == "AllBlocksCleared":
                    self.found.clear()
                elif event["type"] == "BlockRemoved":
                    self.found -= {self._paths[key] for key in event["block_hashes"]}
                else:
                    path = self._paths[event["parent_block_hash"]] if event["parent_block_hash"] is not None else ()
                    for i, key in enumerate(event["block_hashes"]):
                        path += tuple(event["token_ids"][i * BT : (i + 1) * BT])
                        self._paths[key] = path
                        self.found.add(path)
                        self.media[path] = event["medium"]

    def longest(self, tokens: list[int]) -> int:
        return max((n for n in range(0, len(tokens) + 1, BT) if tuple(tokens[:n]) in self.found), default=0)


def test_the_longest_prefix_that_a_listener_knows_is_the_hit_of_the_next_turn() -> None:
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with (
        LLM(weights_path(), "cpu", SMALL, dict.fromkeys(SMALL, 400), kv_events_config=ON) as llm,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        assert llm.kv_events is not None
        socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.subscribe(b"")
        socket.connect(llm.kv_events.endpoint)
        listener, tokens = Listener(socket), make_prompt(700, seed=0).token_ids
        salted = make_prompt(500, seed=9).token_ids
        llm.generate([{"prompt_token_ids": salted, "cache_salt": "tenant"}], greedy, use_tqdm=False)
        for _ in range(3):
            (answer,) = llm.generate([tokens], greedy, use_tqdm=False)
            text = [*tokens, *answer.outputs[0].token_ids][:-1]  # the last token's K and V were never computed
            listener.hear_of(tuple(text[: len(text) // BT * BT]))
            tokens = [*text, *range(100, 120)]
            (again,) = llm.generate([tokens], SamplingParams(max_tokens=1), use_tqdm=False)
            assert sum(again.cached_tokens.values()) == listener.longest(text) > 700
        assert listener.longest(salted) == 0


def test_two_engines_that_share_a_store_tell_of_it_each_for_itself(tmp_path: Path) -> None:
    """A turn at the wrong engine costs a fetch; and the engine that has a text in the store alone says so."""
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    store = {"remote_uri": f"file://{tmp_path / 'kv'}", "key_secret": b"tests", "kv_events_config": ON}
    text = make_prompt(700, seed=3).token_ids
    with (
        LLM(weights_path(), "cpu", SMALL, SMALL, **store) as home,
        LLM(weights_path(), "cpu", SMALL, SMALL, **store) as other,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        assert home.kv_events is not None and other.kv_events is not None
        (first,) = home.generate([text], greedy, use_tqdm=False)
        home.settle()
        turn = [*text, *first.outputs[0].token_ids, *range(100, 130)]
        (away,) = other.generate([turn], greedy, use_tqdm=False)
        (there,) = home.generate([turn], greedy, use_tqdm=False)
        assert away.outputs[0].token_ids == there.outputs[0].token_ids
        assert away.cached_tokens == {"device": 0, "host": 0, "remote": (len(text) + 7) // BT * BT}
        stats = other.stats()["cache"]["remote"]
        assert (stats["fetched_bytes"] > 0, stats["failed_fetches"], stats["missed_objects"]) == (True, 0, 0)
        home.settle()
        for seed in range(10, 16):  # others, until neither tier has it
            home.generate([make_prompt(1500, seed=seed).token_ids], SamplingParams(max_tokens=1), use_tqdm=False)
        home.settle()
        socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.subscribe(b"")
        socket.connect(home.kv_events.endpoint)
        listener = Listener(socket)
        listener.hear_of(tuple(turn[: len(turn) // BT * BT]))
        assert listener.media[tuple(turn[:BT])] == "STORAGE"
        (again,) = home.generate([[*turn, 1]], greedy, use_tqdm=False)
        assert again.cached_tokens == {"device": 0, "host": 0, "remote": listener.longest(turn)}


@pytest.mark.parametrize(
    ("given", "why"),
    [({**ON, "topics": ""}, "has no 'topics'"), ({**ON, "endpoint": "udp://x"}, "must begin with tcp")],
)
def test_a_config_that_cannot_work_is_refused_before_weights_are_read(given: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(weights_path(), "cpu", kv_events_config=given)


def test_without_a_config_or_with_events_off_nothing_is_published() -> None:
    with LLM(weights_path(), "cpu", SMALL, kv_events_config={"enable_kv_cache_events": False}) as llm:
        assert llm.kv_events is None
