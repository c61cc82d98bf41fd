"""`kvcache serve`: a model behind `/v1/completions`, with the cache below it."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.errors import ConfigError

if TYPE_CHECKING:
    from kvcache.block.layout import KVLayout

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[str, typer.Argument(help="A directory of safetensors, a GGUF file, or `smollm2`.")],
    host: Annotated[str, typer.Option(help="The address to listen on. Clients are not authenticated.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = 8000,
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks of the engine's own memory; by default two contexts, if memory allows."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="A settings file (TOML). Default: the default settings.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens computed in a step.")] = 2048,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most concurrent requests.")] = 64,
) -> None:
    """Serve a model over HTTP (/v1/completions, /v1/chat/completions, /v1/models) until SIGINT or SIGTERM."""
    import kvcache
    from kvcache.fleet.warm import read_prompts
    from kvcache.settings.sources import load
    from kvcache.settings.types import show_bytes

    settings = load(cache)  # settings errors show at once: the other imports take seconds
    prompts = read_prompts(Path(settings.warm.file)) if settings.warm.file else []
    with bind_listener(host, port) as listener:
        import uvicorn

        from kvcache.cache.cache import Cache
        from kvcache.engine.engine import Engine, EngineConfig
        from kvcache.engine.loop import EngineLoop
        from kvcache.engine.model import load_model
        from kvcache.engine.server import Server
        from kvcache.engine.tokenizer import Tokenizer
        from kvcache.fleet.node import warm_up

        whole = settings.identity.read_every_byte
        runner = load_model(model, dtype=dtype, block_tokens=settings.block_tokens, read_every_byte=whole)
        tokenizer = Tokenizer(runner.directory)
        name = Path(model).name
        pages = pages or default_pages(runner.layout)
        # uvicorn shuts down in order, then raises the signal again. Only an exception lets the cache shut down in order
        # too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt), kvcache.open(cache) as opened:
            engine = Engine(
                runner,
                opened,
                EngineConfig(pages=pages, name=name, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences),
                decode=tokenizer.decode,
            )
            ready = opened.ready if isinstance(opened, Cache) else lambda: True
            app = Server(EngineLoop(engine), tokenizer, model=name, ready=ready).application()
            listener.listen()  # before the next line is printed, so that its reader can connect
            where = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
            held = show_bytes(pages * runner.layout.block_bytes())
            print(
                f"kvcache: {name} at {where}, {pages} pages ({held}), {engine.max_tokens} tokens a request", flush=True
            )
            if host not in LOOPBACK:
                print(f"kvcache: {host} is not loopback: any client that reaches it can use this model", flush=True)
            if prompts and isinstance(opened, Cache):
                warm_up(opened, where, prompts)
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def bind_listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; give another, --port 0 for any") from None
    return listener


def default_pages(layout: KVLayout) -> int:
    """Return the pages of two whole contexts, or of a quarter of the memory where that is less."""
    from kvcache.machine import memory

    contexts = -(-2 * layout.max_tokens // layout.block_tokens)
    return max(1, min(contexts, memory().allowed_bytes // 4 // layout.block_bytes()))


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)
