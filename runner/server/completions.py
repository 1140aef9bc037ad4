"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.engine.outputs import CompletionOutput, RequestOutput
from runner.sampling.params import SamplingParams
from runner.server.answers import Generation, logprob
from runner.server.auth import Caller
from runner.server.errors import ApiError
from runner.server.protocol import CompletionBody
from runner.server.served import Read, Served

DEFAULT_MAX_TOKENS = 16


class Completions(Generation):
    """Texts that go on from prompts; with ``echo`` they begin with them."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: Served, body: CompletionBody, request_id: str, caller: Caller) -> None:
        super().__init__(served, body, request_id, caller)
        self.body = body
        self._lengths: dict[int, int] = {}
        if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
            raise ApiError(400, "logprobs of a prompt are not streamed; use stream=false", param="stream")
        if body.max_tokens == 0 and (not body.echo or body.stream):
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo and without stream", param="max_tokens")

    def read(self) -> list[Read]:
        return self.served.read(self.body.prompt, self.body.add_special_tokens is not False)

    def params(self, prompt: Read) -> SamplingParams:
        body = self.body
        of_prompt = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        return self.served.sampling(
            body,
            len(prompt.token_ids),
            max_tokens=None if body.max_tokens is None else max(1, body.max_tokens),
            default=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=of_prompt,
        )

    def opening(self, index: int, prompt: Read, output: RequestOutput) -> list[dict[str, Any]]:
        if not self.body.echo and not self.body.return_token_ids:
            return []
        ids = {"prompt_token_ids": output.prompt_token_ids, "token_ids": []} if self.body.return_token_ids else {}
        text = self._text_of(prompt) if self.body.echo else ""
        self._lengths[index] = len(text)
        return [{"index": index, "text": text, "logprobs": None, "finish_reason": None, **ids}]

    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        if not answer.text and not answer.finish_reason and not answer.logprobs and not self.body.return_token_ids:
            return {}
        choice: dict[str, Any] = {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.logprobs is not None:
            start = self._lengths.get(index, 0)
            choice["logprobs"] = self._logprobs(answer.token_ids, answer.logprobs, start)
            self._lengths[index] = start + sum(map(len, choice["logprobs"]["tokens"]))
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def choice(self, index: int, prompt: Read, answer: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        body, text, ids = self.body, answer.text, answer.token_ids
        found: Sequence[Mapping[int, Any] | None] | None = answer.logprobs
        if body.max_tokens == 0:
            text, ids, found = "", [], [] if found is not None else None
        if body.echo:
            text = self._text_of(prompt) + text
            if found is not None:
                ids = [*output.prompt_token_ids, *ids]
                found = [*(output.prompt_logprobs or [None] * len(prompt.token_ids)), *found]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if found is None else self._logprobs(ids, found, 0),
            "finish_reason": "length" if body.max_tokens == 0 else answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [_by_id(row) for row in output.prompt_logprobs or ()]
        if body.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": answer.token_ids}
        return choice

    def _text_of(self, prompt: Read) -> str:
        if prompt.text is not None or self.served.llm.tokenizer is None:
            return prompt.text or ""
        return str(self.served.llm.tokenizer.decode(prompt.token_ids.tolist()))

    def _logprobs(self, ids: Sequence[int], rows: Sequence[Mapping[int, Any] | None], start: int) -> dict[str, Any]:
        """OpenAI's old form: lists side by side, one entry a token. A prompt's first token has no logprob."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, row in zip(ids, rows, strict=True):
            names = {i: self._name(i, None if row is None else row[i].decoded_token) for i in row or (token,)}
            found["tokens"].append(names[token])
            found["token_logprobs"].append(None if row is None else logprob(row[token].logprob))
            best = None if row is None else {names[i]: logprob(one.logprob) for i, one in row.items()}
            found["top_logprobs"].append(best)
            found["text_offset"].append(start)
            start += len(names[token])
        return found

    def _name(self, token: int, decoded: str | None) -> str:
        if decoded is None:
            decoded = self.served.llm.words.of(token)
        return f"<{token}>" if decoded is None else decoded


def _by_id(row: Mapping[int, Any] | None) -> dict[str, Any] | None:
    """vLLM's form of a prompt token's logprobs."""
    if row is None:
        return None
    return {
        str(i): {"logprob": logprob(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for i, one in row.items()
    }
