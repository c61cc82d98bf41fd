"""`kvcache serve`: a model behind `/v1/completions`, with the cache under it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvcache.block.layout import KVLayout

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[str, typer.Argument(help="A directory of safetensors, a GGUF file, or `smollm2`.")],
    host: Annotated[str, typer.Option(help="The address to listen on. Nobody is asked who they are.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks of the engine's own memory; by default two contexts, if memory allows."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="A settings file (TOML); without one, defaults.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed a step, at most.")] = 2048,
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests that run at a time, at most.")] = 64,
) -> None:
    """Serve a model over HTTP: /v1/completions and /v1/models."""
    import uvicorn

    import kvcache
    from kvcache.config import load
    from kvcache.engine.engine import Engine
    from kvcache.engine.loop import EngineLoop
    from kvcache.engine.model import load_model
    from kvcache.engine.server import Server
    from kvcache.engine.tokenizer import Tokenizer
    from kvcache.units import show_bytes

    settings = load(cache)
    runner = load_model(model, dtype=dtype, block_tokens=settings.block_tokens)
    tokenizer = Tokenizer(runner.directory)
    name = Path(model).name
    pages = pages or fitting(runner.layout)
    with kvcache.open(cache) as opened:
        engine = Engine(
            runner,
            opened,
            pages=pages,
            name=name,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            decode=tokenizer.decode,
        )
        app = Server(EngineLoop(engine), tokenizer, model=name).application()
        held = show_bytes(pages * runner.layout.block_bytes())
        print(f"kvcache: {name} on http://{host}:{port}, {pages} pages ({held}), {engine.max_tokens} tokens a request")
        if host not in LOOPBACK:
            print(f"kvcache: {host} is not loopback: whoever reaches it may use this model")
        uvicorn.run(app, host=host, port=port, log_level="warning")


def fitting(layout: KVLayout) -> int:
    """Pages for two whole contexts, or for a quarter of the memory if that is less."""
    from kvcache.machine import memory

    contexts = -(-2 * layout.max_tokens // layout.block_tokens)
    return max(1, min(contexts, memory().allowed_bytes // 4 // layout.block_bytes()))


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)
