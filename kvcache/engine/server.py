"""The engine behind HTTP: `/v1/completions`, `/v1/chat/completions` and `/v1/models` in OpenAI's shapes, and `/readyz`.

Answers are not streamed. The server is meant for loopback: it does not authenticate.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from queue import Full
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcache.engine.completion import (
    ChatRequest,
    CompletionRequest,
    CompletionRequestBase,
    RequestError,
    answer_text,
    completion_body,
    error_body,
)
from kvcache.engine.loop import EngineLoop
from kvcache.engine.sequence import RequestOutput
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ClosedError, KVCacheError

MAX_BODY_BYTES = 32 << 20
CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that has disconnected; never received


class Server:
    """Answers for one model. The application owns the engine loop and closes it when the application ends."""

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, *, model: str, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._model, self._ready = model, ready
        self._since = int(time.time())

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/readyz", self._readiness, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_error, KVCacheError: _kvcache_error, Exception: _internal_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(self._loop.close)

    async def _readiness(self, _: Request) -> Response:
        """Return 200, or 503 while the preload is incomplete. Requests are answered in both cases."""
        ready = self._ready()
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def _models(self, _: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": self._since, "owned_by": "kvcache"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        body = CompletionRequest.read(await _body(request))
        return await self._answer(request, body, lambda: body.prompts(self._tokenizer.encode))

    async def _chat(self, request: Request) -> Response:
        body = ChatRequest.read(await _body(request))
        return await self._answer(request, body, lambda: body.prompts(self._tokenizer.chat))

    async def _answer(
        self, request: Request, body: CompletionRequestBase, ask: Callable[[], list[list[int]]]
    ) -> Response:
        """Answer a completion. `ask` returns the prompts, in a thread since tokenizers may be slow."""
        if body.model != self._model:
            message = f"model {body.model!r}: this server does not have it; it serves {self._model!r}"
            return JSONResponse(
                error_body(message, kind="invalid_request_error", param="model", code="model_not_found"),
                status_code=404,
            )
        params = body.params()
        prompts = await run_in_threadpool(ask)
        futures: list[Future[RequestOutput]] = []
        try:
            for prompt in prompts:
                futures.append(self._loop.submit(prompt, params))  # noqa: PERF401  on a refusal the earlier futures must be known
            results = await _while_connected(request, futures)
        except Full as error:
            raise HTTPException(429, str(error)) from None
        finally:
            for future in futures:
                future.cancel()  # no effect on a finished one
        if results is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        texts = [answer_text(result, self._tokenizer.decode, params.stop) for result in results]
        return JSONResponse(completion_body(self._model, results, texts, chat=isinstance(body, ChatRequest)))


async def _while_connected(request: Request, futures: list[Future[RequestOutput]]) -> list[RequestOutput] | None:
    """Return the results, or None once the client has disconnected."""
    work = asyncio.gather(*map(asyncio.wrap_future, futures))
    disconnected = asyncio.ensure_future(_disconnect(request))
    either: set[asyncio.Future[Any]] = {work, disconnected}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        disconnected.cancel()
        work.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Any:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "rate_limit_error" if error.status_code == 429 else "invalid_request_error"
    return JSONResponse(error_body(error.detail, kind=kind), status_code=error.status_code, headers=error.headers)


async def _kvcache_error(_: Request, error: Exception) -> Response:
    if isinstance(error, ClosedError):
        return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)
    param = error.param if isinstance(error, RequestError) else None
    return JSONResponse(error_body(str(error), kind="invalid_request_error", param=param), status_code=400)


async def _internal_error(_: Request, error: Exception) -> Response:
    return JSONResponse(error_body("internal error of the server; see its log", kind="server_error"), status_code=500)
