"""What a process needs to play a script: the model, its tokenizer, the prompts, engines and a cache.

The passes of one demo use the same, and so does the new process, which is told everything by its command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import kvcache
from examples.demo.run import (
    SCRIPT_STEPS,
    SHARED_TOKENS,
    DemoPass,
    ModelCall,
    Prompt,
    Script,
    agent_script,
    environment,
    read_prompts,
    recorded_script,
    run_script,
    shared_text,
    within_budget,
)
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ConfigError

_AGENTS_TOKENS = SHARED_TOKENS + 1500  # the shared text and what a conversation comes to
_QUICK_PROMPTS = 10
_QUICK_BUDGET_S = 40.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What was asked for on the command line."""

    directory: Path
    model: str = "smollm2"
    dtype: str = "fp32"
    prompts: Path | None = None
    quick: bool = False
    where: str | None = None  # of a daemon; without one each process owns its cache

    @property
    def answer_tokens(self) -> int:
        return 16 if self.quick else 48

    @property
    def budget_s(self) -> float | None:
        """Of the pass without the cache: it does not begin another call after so long."""
        return _QUICK_BUDGET_S if self.quick else None

    def options(self) -> list[str]:
        """The options that tell another process the same wish."""
        options = ["--directory", str(self.directory), "--model", self.model, "--dtype", self.dtype]
        if self.prompts is not None:
            options += ["--prompts", str(self.prompts)]
        if self.where is not None:
            options += ["--where", self.where]
        return [*options, "--quick"] if self.quick else options


class DemoEnvironment:
    """Loads the model. `notes`: what a spectator must know about what is played."""

    def __init__(self, wish: DemoOptions) -> None:
        self.wish = wish
        self.notes: list[str] = []
        self.model = load_model(wish.model, dtype=wish.dtype)
        self.tokenizer = Tokenizer(self.model.directory)
        self.params = SamplingParams(max_tokens=wish.answer_tokens)
        self._shared: dict[str, str] = {}
        self._recorded: list[Prompt] = []
        if wish.prompts is None:
            self._agents()
        else:
            self._read(wish.prompts)
        self.calls = len(self._recorded) or len(SCRIPT_STEPS)
        if wish.quick:
            self.notes.append(
                f"--quick: answers of {wish.answer_tokens} tokens; without the cache no call begins after "
                f"{wish.budget_s:.0f} s, and only calls that every pass played are compared"
            )

    def _agents(self) -> None:
        if self.model.max_tokens < _AGENTS_TOKENS:
            raise ConfigError(
                f"--model {self.wish.model}: holds {self.model.max_tokens} tokens, the agents need {_AGENTS_TOKENS}: "
                "give another model, or --prompts with shorter ones"
            )
        self._shared = shared_text(self.tokenizer)
        self.notes.append(
            f"{len(SCRIPT_STEPS)} calls of {len({step.agent for step in SCRIPT_STEPS})} agents for one user request; "
            f"they share "
            f"{SHARED_TOKENS:,} tokens of this project's documentation: {', '.join(self._shared)} as 2 : 3 : 5"
        )

    def _read(self, path: Path) -> None:
        longest = self.model.max_tokens - self.wish.answer_tokens
        self._recorded, longer = read_prompts(path, self.tokenizer, longest_tokens=longest)
        found = f"{path.name}: {len(self._recorded)} prompts"
        if longer:
            found += f", {longer} more left out for being longer than {longest:,} tokens"
        self.notes.append(found)
        if self.wish.quick and len(self._recorded) > _QUICK_PROMPTS:
            del self._recorded[_QUICK_PROMPTS:]
            self.notes.append(f"--quick: only the first {_QUICK_PROMPTS} of them")

    def script(self) -> Script:
        return recorded_script(self._recorded) if self._recorded else agent_script(self.tokenizer, self._shared)

    def open(self) -> kvcache.KVCache:
        if self.wish.where is not None:
            return kvcache.open(self.wish.where)
        return kvcache.open(nvme={"path": str(self.wish.directory)})

    def engine(self, cache: kvcache.KVCache | None) -> Engine:
        pages = -(-self.model.max_tokens // self.model.layout.block_tokens)
        return Engine(self.model, cache, EngineConfig(pages=pages, name=self.wish.model))

    def run_script(self, engine: Engine) -> Iterator[ModelCall]:
        return run_script(self.script(), engine, self.tokenizer, self.params)

    def passes(self) -> Iterator[tuple[DemoPass, Iterator[ModelCall]]]:
        """The four passes, each with the calls to come: to be used up before the next one is asked for."""
        engine = self.engine(None)
        yield self._pass("without", "without the cache"), within_budget(self.run_script(engine), self.wish.budget_s)
        cache = self.open()
        try:
            engine = self.engine(cache)
            yield self._pass("cold", f"with the cache, which {_holds(cache)}"), self.run_script(engine)
            engine.pool.clear()
            yield self._pass("warm", "the same again, the engine's own pool (hbm) emptied"), self.run_script(engine)
            if not (report := cache.flush()):
                raise SystemExit(f"the last pass cannot be shown: not every block reached its tier: {report}")
        finally:
            cache.close()
        left = "on the drive" if self.wish.where is None else "in the daemon"
        last = self._pass("restarted", f"the same again in a new process, over what is {left}")
        yield last, _new_process(self.wish, last)

    def _pass(self, name: str, about: str) -> DemoPass:
        return DemoPass(name, about, self.calls)


def _holds(cache: kvcache.KVCache) -> str:
    records = cache.stats()["tiers"]["nvme"]["records"]
    return f"holds {records:,} blocks of an earlier run" if records else "is empty"


def run_child(wish: DemoOptions) -> None:
    """In the new process: play over the directory as it is, one JSON line a call, an empty line first."""
    stage = DemoEnvironment(wish)
    cache = stage.open()
    try:
        engine = stage.engine(cache)
        print(flush=True)
        for call in stage.run_script(engine):  # as they end: the parent shows them
            print(json.dumps(asdict(call)), flush=True)
    finally:
        cache.close()


def _new_process(wish: DemoOptions, whose: DemoPass) -> Iterator[ModelCall]:
    begun = time.monotonic()
    command = [sys.executable, "-m", "examples.demo", "--child", *wish.options()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stdout is not None, "it is a pipe"
        try:
            child.stdout.readline()
            whose.start_s = time.monotonic() - begun
            for line in child.stdout:
                yield ModelCall(**json.loads(line))
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise ChildProcessError(f"the new process ended with code {child.returncode}: it says why above")
