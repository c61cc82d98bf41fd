"""Load or recompute: the time to the first token with a Redis behind a slow line, beside no cache at all.

SmolLM2 in bf16, prompts of 512 tokens of the project's own documentation, stored in a Redis by one cache and asked for
by another, whose line to it a proxy holds to so many bytes a second, both ways together. Each prompt is new to each
engine; engines take turns. Ratios of medians to no cache: 1 is no slower.

    plan/1MBps          with the plan; peer: with the plan switched off
    plan/5MBps
    plan/50MBps
    plan/1MBps/alone    without a cache, in ms: what the ratio is of

A few prompts before, which are not counted, let the plan see what the engine and the line take.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, suppress
from statistics import median
from typing import Any

from harness import Row, flush, options, publish

import kvcache
from examples.demo.run import text_parts
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import Model, load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.tokenizer import Tokenizer
from tests.peer.redis_server import RedisServer

RATES = {"1MBps": 1e6, "5MBps": 5e6, "50MBps": 50e6}
TOKENS, BEFORE = 512, 4
PIECE = 16 << 10


class Line:
    """A proxy in front of a port, that passes so many bytes a second, of all connections and both ways together."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.rate = float("inf")
        self._free = 0.0
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                with self._lock:
                    now = time.monotonic()
                    self._free = max(now, self._free) + len(data) / self.rate
                    wait = self._free - now
                time.sleep(wait)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def set(self, rate: float) -> None:
        with self._lock:
            self.rate, self._free = rate, 0.0

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            end.close()


def opened(url: str, *, plan: bool) -> Any:
    return kvcache.open(
        host={"capacity_bytes": "512MiB"},
        nvme={"enabled": False},
        control={"enabled": False},
        redis={"enabled": True, "url": url},
        plan={"enabled": plan},
    )


def engine_of(model: Model, cache: Any) -> Engine:
    made = Engine(
        model,
        cache,
        EngineConfig(pages=model.max_tokens // model.layout.block_tokens, max_batch_tokens=model.max_tokens),
    )
    for length in (64, 17):
        made.generate([[7] * length], SamplingParams(max_tokens=2))
    return made


def first_ms(engine: Engine, prompt: list[int]) -> float:
    [result] = engine.generate([prompt], SamplingParams(max_tokens=1))
    return 1000 * result.ttft_s


def measure(model: Model, server: RedisServer, texts: list[list[int]], rate: float) -> dict[str, float]:
    """Medians in ms: without a cache, with the plan, without the plan."""
    line = Line(server.port)
    times: dict[str, list[float]] = {"alone": [], "plan": [], "off": []}
    with closing(line), closing(opened(line.url, plan=True)) as planned, closing(opened(line.url, plan=False)) as off:
        engines = {"alone": engine_of(model, None), "plan": engine_of(model, planned), "off": engine_of(model, off)}
        caches = {"plan": planned, "off": off}
        line.set(rate)
        for i, prompt in enumerate(texts):
            for name, engine in list(engines.items())[:: 1 if i % 2 else -1]:  # none always comes after another
                if name != "off" or i >= BEFORE:
                    times[name].append(first_ms(engine, prompt))
                if name != "alone":
                    settled(line, engine, caches[name], hurry=name == "off")
        line.set(float("inf"))  # so that closing need not wait
    return {name: median(took[0 if name == "off" else BEFORE :]) for name, took in times.items()}


def settled(line: Line, engine: Engine, cache: Any, *, hurry: bool) -> None:
    """What the last request still has under way must not slow the next one of another engine. `hurry`: at any rate,
    where no cache learns from the time it takes."""
    rate = line.rate
    if hurry:
        line.set(float("inf"))
    cache.tier_manager.promoter.wait_idle()
    while engine.pool.held:
        time.sleep(0.01)
        engine.pool.poll()
    line.set(rate)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory of safetensors, a GGUF file, or smollm2")
    parser.add_argument("--prompts", type=int, help="counted prompts of each rate")
    arguments = parser.parse_args()
    count = BEFORE + (arguments.prompts or (3 if arguments.quick else 5))
    model = load_model(arguments.model, dtype="bf16")
    ids = Tokenizer(model.directory).encode("\n".join(text_parts().values()))
    texts = [ids[97 * i : 97 * i + TOKENS] for i in range(count)]
    server = RedisServer()
    rows = []
    try:
        with closing(opened(server.tcp, plan=False)) as cache:
            engine = engine_of(model, cache)
            for prompt in texts:
                engine.generate([prompt], SamplingParams(max_tokens=1))
            flush(cache)
        for name, rate in RATES.items():
            ms = measure(model, server, texts, rate)
            rows.append(Row(f"plan/{name}", ms["plan"] / ms["alone"], "ratio", peer=ms["off"] / ms["alone"]))
            rows.append(Row(f"plan/{name}/alone", ms["alone"], "ms"))
    finally:
        server.end()
    kept = model.layout.context_bytes(TOKENS) / 1e6
    notes = [f"medians of {count - BEFORE} prompts of {TOKENS} tokens, {kept:.1f} MB of keys and values each"]
    publish("load_or_recompute", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()
