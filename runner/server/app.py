"""The FastAPI app: routes, and what stands around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

from runner.api.async_llm import AsyncLLM
from runner.metrics.metrics import Metrics
from runner.server import answer_forms
from runner.server.admission import CutOff
from runner.server.answers import Generation
from runner.server.auth import ApiKeys, Caller, RequestIds
from runner.server.browsers import Browsers
from runner.server.chat import Chats
from runner.server.completions import Completions
from runner.server.errors import ApiError, add_handlers, as_api_error, stopping
from runner.server.page.routes import add_page
from runner.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from runner.server.requests import Buffers, JsonRoute
from runner.server.served import Served
from runner.server.settings import Settings

T = TypeVar("T")

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answer_forms.Error} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
}


def create_app(llm: AsyncLLM, settings: Settings) -> FastAPI:
    """An app that serves ``llm``; the caller closes ``llm``."""
    app = FastAPI(title="kvtier", version=_version(), responses=_ERRORS, docs_url=None, redoc_url=None)  # of a CDN
    app.router.route_class = JsonRoute
    llm.metrics = Metrics(llm, settings.names[0])
    app.state.served = served = Served(llm, settings, llm.metrics)
    app.state.buffers = Buffers(settings, served.on_refusal)
    app.state.started_s = int(time())
    add_handlers(app)
    _add_generating(app)
    _add_texts(app)
    _add_models(app)
    _add_looking_in(app)
    add_page(app)
    app.add_middleware(ApiKeys, keys=app.state.served.keys)
    app.add_middleware(Browsers, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(CutOff, admission=served.admission)
    app.add_middleware(RequestIds)
    return app


def _served(request: Request) -> Served:
    served: Served = request.app.state.served
    return served


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _respond(kind: type[Generation], body: Any, request: Request) -> Response:
    generation = kind(_served(request), body, request.state.request_id, _caller(request))
    return await generation.respond(request)


def _add_generating(app: FastAPI) -> None:
    events = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}

    @app.post("/v1/completions", responses={200: {**events[200], "model": answer_forms.Completion}}, tags=["generate"])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Goes on from one prompt or several."""
        return await _respond(Completions, body, request)

    @app.post(
        "/v1/chat/completions",
        responses={200: {**events[200], "model": answer_forms.ChatCompletion}},
        tags=["generate"],
    )
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return await _respond(Chats, body, request)


def _add_texts(app: FastAPI) -> None:
    @app.post("/tokenize", responses={200: {"model": answer_forms.Tokenized}}, tags=["texts"])
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the chat template writes it."""
        served = _served(request)
        served.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")

        def read() -> tuple[list[int], list[str] | None]:
            ids: list[int] = []
            if body.messages is not None:
                ids = served.read_chat(body).token_ids.tolist()
            elif body.prompt:
                ids = served.read(body.prompt, body.add_special_tokens is not False)[0].token_ids.tolist()
            return ids, served.token_strings(ids) if body.return_token_strs else None

        ids, names = await _on_thread(read, body, request)
        return JSONResponse({"count": len(ids), "max_model_len": served.longest, "tokens": ids, "token_strs": names})

    @app.post("/v1/completions/render", responses={200: {"model": list[answer_forms.Rendered]}}, tags=["texts"])
    async def render(body: CompletionBody, request: Request) -> Response:
        """Token ids of each prompt of a completion, which is not answered: routers ask for them."""
        return JSONResponse(await _rendered(Completions, body, request))

    @app.post("/v1/chat/completions/render", responses={200: {"model": answer_forms.Rendered}}, tags=["texts"])
    async def render_chat(body: ChatBody, request: Request) -> Response:
        """Token ids of a conversation, with its tools, as the chat template writes it."""
        return JSONResponse((await _rendered(Chats, body, request))[0])

    @app.post("/detokenize", responses={200: {"model": answer_forms.Detokenized}}, tags=["texts"])
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids."""
        served = _served(request)
        served.check_model(body.model)
        text = await _on_thread(lambda: served.decode(body.tokens), body, request)
        return JSONResponse({"prompt": text})


async def _rendered(kind: type[Generation], body: Any, request: Request) -> list[Mapping[str, Any]]:
    served, name = _served(request), request.state.request_id
    served.check_model(body.model)
    found = await _on_thread(kind(served, body, name, _caller(request)).read, body, request)
    return [{"request_id": name, "model": served.settings.names[0], "token_ids": r.token_ids.tolist()} for r in found]


async def _on_thread(work: Callable[[], T], body: Body, request: Request) -> T:
    served = _served(request)
    ticket = served.admission.enter()
    try:
        return await served.on_thread(work, request.state.body_bytes)
    except Exception as problem:
        raise as_api_error(problem, list(type(body).model_fields)) from problem
    finally:
        ticket.close()


def _add_models(app: FastAPI) -> None:
    def model_card(request: Request, name: str) -> Mapping[str, Any]:
        served = _served(request)
        return {
            "id": name,
            "object": "model",
            "created": request.app.state.started_s,
            "owned_by": "kvtier",
            "root": served.llm.model.name,
            "parent": None,
            "max_model_len": served.longest,
        }

    @app.get("/v1/models", tags=["look in"])
    async def models(request: Request) -> Response:
        """The names that the model is served under."""
        cards = [model_card(request, name) for name in _served(request).settings.names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", tags=["look in"])
    async def model(name: str, request: Request) -> Response:
        """One of them."""
        _served(request).check_model(name)
        return JSONResponse(model_card(request, name))


def _add_looking_in(app: FastAPI) -> None:
    @app.get("/health", tags=["look in"])
    async def health(request: Request) -> Response:
        """200 while the engine serves, 503 once it has died."""
        await _served(request).llm.check_health()
        return Response()

    @app.get("/ready", tags=["look in"])
    async def ready(request: Request) -> Response:
        """200 while new requests are taken; 503 once the server is stopping, or the engine has died."""
        served = _served(request)
        await served.llm.check_health()
        if served.admission.is_draining:
            raise stopping(served.settings.drain_timeout_s)
        return Response()

    @app.get("/metrics", tags=["look in"])
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        found = _served(request).metrics
        return Response(await asyncio.to_thread(found.render), headers={"Content-Type": found.content_type})

    @app.get("/v1/requests/{name:path}/explain", responses={200: {"model": answer_forms.Explained}}, tags=["look in"])
    async def explain(name: str, request: Request) -> Response:
        """Where the time of a request went; ``name`` is the id of its answer, or the X-Request-Id."""
        served, caller = _served(request), _caller(request)
        ids = name, *(f"{kind.prefix}-{name}" for kind in (Completions, Chats))
        known = next((one for one in ids if served.llm.explanations.knows(one, caller.sees)), name)
        told = await served.explaining.run(lambda: served.llm.explain(known, caller.sees).to_dict())
        return JSONResponse(told)

    @app.get("/version", tags=["look in"])
    async def version_() -> Response:
        """The version of kvtier."""
        return JSONResponse({"version": app.version})

    @app.get("/load", tags=["look in"])
    @app.get("/v1/load", tags=["look in"])
    async def load(request: Request) -> Response:
        """Open HTTP requests that generate, and what the engine has of them."""
        served = _served(request)
        return JSONResponse({"server_load": len(served.admission.tickets), **served.llm.load()})

    @app.post("/reset_prefix_cache", tags=["look in"])
    async def reset_prefix_cache(request: Request) -> Response:
        """Forgets all cached content. Running requests go on; no other request finds their content."""
        served = _served(request)
        served.keys.check_reset(_caller(request))
        return JSONResponse({"reset": await served.llm.reset_prefix_cache()})


def _version() -> str:
    try:
        return version("kvtier")
    except PackageNotFoundError:
        from kvtier import __version__

        return __version__
