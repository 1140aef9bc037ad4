"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.engine.outputs import CompletionOutput, RequestOutput
from runner.sampling.params import SamplingParams
from runner.server.answers import Generation, logprob
from runner.server.auth import Caller
from runner.server.errors import ApiError
from runner.server.protocol import ChatBody
from runner.server.served import Read, Served


class Chats(Generation):
    """Answers to conversations. Tools are told to the model through its template; what it says is text."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: Served, body: ChatBody, request_id: str, caller: Caller) -> None:
        super().__init__(served, body, request_id, caller)
        self.body = body
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400,
                "tool_choice can be none or auto: tools are told to the model, but calls in its answer are not parsed",
                param="tool_choice",
            )
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "logprobs of a prompt are not streamed; use stream=false", param="stream")
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")

    def read(self) -> list[Read]:
        body = self.body
        options: dict[str, Any] = {}
        if body.tool_choice == "none":
            options["tools"] = None
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
        return [self.served.read_chat(body, **options)]

    def params(self, prompt: Read) -> SamplingParams:
        body = self.body
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        top = (body.top_logprobs or 0) if body.logprobs else None
        asked = getattr(body, field)
        return self.served.sampling(body, len(prompt.token_ids), max_tokens=asked, field=field, logprobs=top)

    def opening(self, index: int, prompt: Read, output: RequestOutput) -> list[dict[str, Any]]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": []}
        return [choice]

    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        if not answer.text and not answer.finish_reason and not answer.logprobs and not self.body.return_token_ids:
            return {}
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": answer.text} if answer.text or not answer.finish_reason else {},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def choice(self, index: int, prompt: Read, answer: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": answer.token_ids}
        return choice

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        return {"content": _entries(answer.token_ids, answer.logprobs, self.body.top_logprobs or 0)}


def _entries(ids: Sequence[int], rows: Sequence[Mapping[int, Any]], top: int) -> list[dict[str, Any]]:
    found = []
    for token, row in zip(ids, rows, strict=True):
        best = sorted(row.items(), key=lambda item: item[1].rank or 0)[:top]
        found.append({**_entry(token, row[token]), "top_logprobs": [_entry(i, one) for i, one in best]})
    return found


def _entry(token: int, one: Any) -> dict[str, Any]:
    name = f"<{token}>" if one.decoded_token is None else one.decoded_token
    return {"token": name, "logprob": logprob(one.logprob), "bytes": list(name.encode("utf-8", "replace"))}
