"""The HTTP face, with a tiny real model behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.loop import EngineLoop
from kvcache.engine.model import load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.server import MAX_BODY_BYTES, Server
from kvcache.engine.tokenizer import Tokenizer
from kvcache.testing.naive_cache import NaiveCache
from tests.engine import tiny_model

PROMPT = "A cache is a promise about the past. " * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model.make(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def engine(directory: Path) -> Engine:
    model = load_model(str(directory))
    return Engine(model, NaiveCache(), EngineConfig(pages=64), decode=Tokenizer(str(directory)).decode)


@pytest.fixture
def client(engine: Engine, directory: Path) -> Iterator[TestClient]:
    loop = EngineLoop(engine, backlog=8)
    app = Server(loop, Tokenizer(str(directory)), model="tiny").application()
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    assert loop.check() == []
    assert engine.pool.held == 0


def ask(client: TestClient, **body: Any) -> Any:
    wanted = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    return client.post("/v1/completions", json=wanted)


def expected(directory: Path, prompt: str, max_tokens: int) -> str:
    tokenizer = Tokenizer(str(directory))
    [result] = Engine(load_model(str(directory)), None, EngineConfig(pages=64)).generate(
        [tokenizer.encode(prompt)], SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )
    return tokenizer.decode(result.token_ids)


def test_models_lists_the_served_model(client: TestClient) -> None:
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    [model] = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "kvcache")


def test_a_completion_has_openais_schema(client: TestClient, directory: Path) -> None:
    body = ask(client).json()
    tokens = len(Tokenizer(str(directory)).encode(PROMPT))
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": expected(directory, PROMPT, 8), "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 8,
        "total_tokens": tokens + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_repeated_prompt_reports_cached_tokens(client: TestClient) -> None:
    first, second = ask(client).json(), ask(client).json()
    assert second["choices"] == first["choices"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16


def test_every_prompt_type_is_accepted(client: TestClient, directory: Path) -> None:
    ids = Tokenizer(str(directory)).encode(PROMPT)
    [text] = (choice["text"] for choice in ask(client).json()["choices"])
    for prompt in (ids, [PROMPT], [ids]):
        assert [c["text"] for c in ask(client, prompt=prompt).json()["choices"]] == [text]
    both = ask(client, prompt=[PROMPT, "Another"]).json()
    assert [c["text"] for c in both["choices"]] == [text, expected(directory, "Another", 8)]
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert both["usage"]["completion_tokens"] == 16


def test_a_chat_has_openais_schema(client: TestClient, directory: Path) -> None:
    """The prompt is what the model's own template makes of the messages."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "And the future?"}]
    ids = Tokenizer(str(directory)).chat(messages)
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0, "ignore_eos": True}
    first, second = (client.post("/v1/chat/completions", json=asked).json() for _ in range(2))
    [choice] = ask(client, prompt=ids).json()["choices"]
    assert first["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": choice["text"]},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert (first["object"], first["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (len(ids), 8)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": []}, "tools"),
    ],
)
def test_unsupported_messages_are_refused(client: TestClient, wrong: dict[str, Any], param: str) -> None:
    response = client.post("/v1/chat/completions", json={"model": "tiny", **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_stop_string_ends_the_answer_and_is_removed(client: TestClient) -> None:
    whole = ask(client).json()["choices"][0]["text"]
    stop = whole[3:5]
    [choice] = ask(client, stop=stop).json()["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_a_seed_is_repeatable(client: TestClient) -> None:
    texts = [ask(client, temperature=1.0, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_null_and_neutral_values_are_accepted(client: TestClient) -> None:
    neutral = {"n": 1, "stream": False, "echo": False, "presence_penalty": 0.0, "logprobs": None, "suffix": None}
    assert ask(client, **neutral, seed=None, user="me").status_code == 200


@pytest.mark.parametrize(
    ("wrong", "said", "param"),
    [
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": ""}, "empty prompt", None),
        ({"prompt": 5}, "found int", "prompt"),
        ({"prompt": [1, "a"]}, "found int", "prompt"),
        ({"prompt": [[]]}, "empty prompt", None),
        ({"prompt": [True]}, "found bool", "prompt"),
        ({"prompt": [1.5]}, "found float", "prompt"),
        ({"prompt": [-1]}, "position 0", None),
        ({"prompt": [10**6]}, "vocabulary", None),
        ({"prompt": [1] * 600}, "512", None),
        ({"prompt": [PROMPT, ""]}, "empty prompt", None),
        ({"max_tokens": 0}, "max_tokens = 0", None),
        ({"max_tokens": "many"}, "max_tokens = 'many'", "max_tokens"),
        ({"temperature": -1}, "temperature = -1", None),
        ({"top_p": 0}, "top_p", None),
        ({"stop": ""}, "stop", None),
        ({"stop": ["a"] * 5}, "stop", "stop"),
        ({"n": 2}, "n = 2: expected 1", "n"),
        ({"stream": True}, "stream = True: expected False", "stream"),
        ({"logprobs": 3}, "does not support the parameter", "logprobs"),
        ({"max_token": 3}, "does not support the parameter", "max_token"),
    ],
)
def test_an_invalid_request_is_400_with_a_reason(
    client: TestClient, wrong: dict[str, Any], said: str, param: str | None
) -> None:
    response = ask(client, **wrong)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"3"])
def test_a_malformed_body_is_400(client: TestClient, body: bytes) -> None:
    response = client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_missing_field_is_named(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


def test_an_unknown_model_path_or_method_is_refused(client: TestClient) -> None:
    other = ask(client, model="gpt-9")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    assert client.get("/v1/completions").status_code == 405


def test_an_oversized_body_is_refused(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413


def test_requests_beyond_the_backlog_get_429(client: TestClient) -> None:
    response = ask(client, prompt=["a"] * 9)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert ask(client).status_code == 200


def test_an_unexpected_error_is_500_and_serving_continues(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine.model, "forward", lambda *_: 1 / 0)
        response = ask(client)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "division" not in response.text
    assert ask(client).status_code == 200


def test_a_disconnected_clients_request_is_aborted(
    engine: Engine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gone = threading.Event(), threading.Event()
    forward = engine.model.forward

    def watched(*given: Any) -> Any:
        """Computes the second step once no client waits for it any more."""
        assert not begun.is_set() or gone.wait(30)
        begun.set()
        return forward(*given)

    engine.model.forward = watched  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    submit = loop.submit

    def submitted(*given: Any) -> Any:
        future = submit(*given)
        future.add_done_callback(lambda _: gone.set())
        return future

    monkeypatch.setattr(loop, "submit", submitted)
    app = Server(loop, Tokenizer(str(directory)), model="tiny").application()
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": true}'
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if events:
            return events.pop()
        await asyncio.to_thread(begun.wait, 30)
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    loop.close()
    assert sent[0]["status"] == 499
    assert loop.check() == []
    assert engine.pool.held == 0
