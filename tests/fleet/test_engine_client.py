"""What is asked of an engine, and what it may answer: a server of the test's own that says what it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvcache.errors import ConfigError, UnreachableError
from kvcache.fleet.warm import API_KEY_VARIABLE, EngineClient, EngineError, PrefillUsage, Prompt


class Spoken(ThreadingHTTPServer):
    """`say`: status and body of what it answers next, by path; `heard`: path, headers and body of each question."""

    daemon_threads = False

    def __init__(self) -> None:
        self.say: dict[str, tuple[int, bytes]] = {"/v1/models": (200, b'{"data": [{"id": "m"}, {"id": "n"}]}')}
        self.heard: list[tuple[str, Any, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Spoken

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        self.server.heard.append((self.path, self.headers, body))
        status, said = self.server.say.get(self.path, (404, b"nothing here"))
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoken]:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with Spoken() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


USED = b'{"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}'


def test_each_prompt_kind_is_posted_to_its_endpoint(spoken: Spoken, monkeypatch: pytest.MonkeyPatch) -> None:
    spoken.say |= {"/v1/completions": (200, USED), "/v1/chat/completions": (200, USED)}
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    engine = EngineClient(spoken.url + "/v1/")
    messages = [{"role": "user", "content": "hi"}]
    for kind, content in (("text", "a"), ("token_ids", [1, 2]), ("messages", messages)):
        assert engine.prefill(Prompt(kind, content)) == PrefillUsage(40, 32)  # type: ignore[arg-type]
    asked = {"model": "m", "max_tokens": 1, "temperature": 0}
    assert [(path, body) for path, _, body in spoken.heard] == [
        ("/v1/models", None),
        ("/v1/completions", {**asked, "prompt": "a"}),
        ("/v1/completions", {**asked, "prompt": [1, 2]}),
        ("/v1/chat/completions", {**asked, "messages": messages}),
    ]
    assert {headers["authorization"] for _, headers, _ in spoken.heard} == {"Bearer secret"}


def test_a_named_model_is_not_requested(spoken: Spoken) -> None:
    assert EngineClient(spoken.url, "mine").model == "mine"
    assert spoken.heard == []


def test_an_engine_without_cached_tokens_is_accepted(spoken: Spoken) -> None:
    for said in (b"{}", b'{"usage": null}', b'{"usage": {"prompt_tokens": 7, "prompt_tokens_details": null}}'):
        spoken.say["/v1/completions"] = (200, said)
        assert EngineClient(spoken.url, "m").prefill(Prompt("text", "a")).cached == 0


def test_refusals_quote_the_engines_message(spoken: Spoken) -> None:
    spoken.say["/v1/completions"] = (400, b'{"error": {"message": "too long"}}')
    with pytest.raises(EngineError, match="400, too long"):
        EngineClient(spoken.url, "m").prefill(Prompt("text", "a"))
    with pytest.raises(EngineError, match="404, nothing here"):
        EngineClient(spoken.url, "m").prefill(Prompt("messages", [{}]))


@pytest.mark.parametrize("said", [b"no json", b"[]", b"", b"\xff"])
def test_a_server_of_another_protocol_is_refused(spoken: Spoken, said: bytes) -> None:
    spoken.say["/v1/completions"] = (200, said)
    with pytest.raises(UnreachableError, match="/v1/completions"):
        EngineClient(spoken.url, "m").prefill(Prompt("text", "a"))


@pytest.mark.parametrize("said", [b"{}", b'{"data": []}', b'{"data": [{}]}', b'{"data": 7}'])
def test_an_engine_without_models_is_refused(spoken: Spoken, said: bytes) -> None:
    spoken.say["/v1/models"] = (200, said)
    with pytest.raises(UnreachableError, match="--model"):
        _ = EngineClient(spoken.url).model


def test_an_unreachable_engine_is_reported() -> None:
    with pytest.raises(UnreachableError, match="is an engine serving"):
        _ = EngineClient("http://127.0.0.1:1").model


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "file:///etc/passwd", ""])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        EngineClient(url)
