"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}.

Owns       what a client is told of each error, and with which status.
Promises   an error of ours says what to do; an unexpected error is logged and reveals nothing of the server's inside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvtier.machine.errors import CacheClosed, InvalidRequest, KVTierError, RequestTooLarge
from runner.engine.outputs import CompletionOutput
from runner.errors import EngineDead, ForwardFailed, GrammarFailed, NoTokenAllowed, Overloaded, UnknownRequest

log = logging.getLogger("kvtier.server")

TOO_LONG = "context_length_exceeded"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN_PROBLEMS = 5
_LONGEST_NAME = 80


class ApiError(HTTPException):
    """An error that a client is told.

    ``retry_after_s``: when to come back. ``again`` False: clients that retry by themselves should not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        again: bool = True,
        more: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        headers = dict(headers or {})
        if retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if not again:
            headers["x-should-retry"] = "false"
        super().__init__(status, message, headers)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code, **(more or {})}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        return {"error": self.error}


def stopping(after_s: float) -> ApiError:
    """The answer to requests that come, or are cut off, while the server ends."""
    return ApiError(503, "the server is stopping; try again soon", code="stopping", retry_after_s=after_s)


def as_api_error(problem: BaseException, fields: Sequence[str] = ()) -> ApiError:
    """What a client is told of an error. ``fields``: names that a message may begin with, to find the parameter."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, RequestTooLarge):
        blocks = {"needs": problem.needs, "have": problem.have, "longest": problem.longest}
        message = "the prompt can never fit"
        if problem.longest is not None:
            message = f"the longest prompt that fits has {problem.longest:,} tokens, and this one has more"
        message += f" (it needs {_plain(problem.needs)} blocks, and there is room for {_plain(problem.have)})"
        return ApiError(400, message, param="prompt", code=TOO_LONG, more=blocks)
    if isinstance(problem, Overloaded):
        return ApiError(429, str(problem), code="overloaded", retry_after_s=problem.retry_after_s)
    if isinstance(problem, InvalidRequest):
        message = str(problem)
        return ApiError(400, message, param=next((f for f in fields if message.startswith(f)), None))
    if isinstance(problem, UnknownRequest):
        return ApiError(404, str(problem), code="request_not_found")
    if isinstance(problem, (EngineDead, CacheClosed)):  # its thread has logged why, once
        return ApiError(503, "the engine has died; the server has to be started anew", code="engine_dead")
    if isinstance(problem, (NoTokenAllowed, GrammarFailed)):  # by what it has asked for itself
        return ApiError(400, str(problem), code="no_token_left")
    if isinstance(problem, KVTierError):
        log.error("a request failed: %s", problem)
        hidden = isinstance(problem, ForwardFailed)  # it quotes what a library said of the inside
        return ApiError(500, "the model failed; the server's log says why" if hidden else str(problem), code="failed")
    log.error("a request failed", exc_info=problem)
    return ApiError(500, "internal error; the server's log says more", code="internal")


def failed_answer(answer: CompletionOutput, stops_soon: bool) -> ApiError | None:
    """The error that an answer's end is, if it is one."""
    match answer.finish_reason:
        case None | "stop" | "length":
            return None
        case "abort":
            return stopping(1) if stops_soon else ApiError(500, "the request was aborted", code="aborted")
        case "capacity":
            made = f"after {len(answer.token_ids):,} tokens " if answer.token_ids else ""
            message = f"the answer outgrew the KV pools {made}and cannot go on; ask for fewer tokens (max_tokens)"
            return ApiError(500, message, param="max_tokens", code="capacity", again=False)
        case "load_error":
            return ApiError(500, "cached blocks could not be loaded from host memory; try again", code="load_error")
        case _:
            return as_api_error(answer.error or KVTierError("the request failed"))


def add_handlers(app: FastAPI) -> None:
    """Answers every error in OpenAI's shape."""
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(KVTierError, _on_error)
    app.add_exception_handler(Exception, _on_error)


async def _on_http_error(_: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, StarletteHTTPException)
    if not isinstance(problem, ApiError):
        problem = ApiError(problem.status_code, str(problem.detail), headers=problem.headers)
    return JSONResponse(problem.body, problem.status_code, dict(problem.headers or {}))


async def _on_error(request: Request, problem: Exception) -> JSONResponse:
    return await _on_http_error(request, as_api_error(problem))


async def _on_invalid(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, RequestValidationError)
    return await _on_http_error(request, _of_validation(problem.errors()))


def _of_validation(problems: Sequence[Any]) -> ApiError:
    """pydantic's findings as one error; its parameter is the first one's."""
    told = []
    for one in problems[:_SHOWN_PROBLEMS]:
        where = ".".join(str(part)[:_LONGEST_NAME] for part in one["loc"][1:])
        told.append(f"{where}: {one['msg']}" if where else one["msg"])
    more = len(problems) - len(told)
    message = "; ".join([*told, f"and {more} more"] if more > 0 else told)
    first = [str(part)[:_LONGEST_NAME] for part in problems[0]["loc"][1:]]
    return ApiError(400, message, param=first[0] if first else None)


def unknown_field(name: str, known: Sequence[str]) -> str:
    """What is said of a field that there is not."""
    name = name[:_LONGEST_NAME]
    near = get_close_matches(name.lower(), known, n=1)
    return f"unrecognized request argument: {name!r}" + (f"; is it {near[0]!r}?" if near else "")


def _plain(blocks: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {n}" for name, n in blocks.items()) + "}"
