"""A pass: a script played on an engine, one call after the other, and what it came to."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import kvcache
from kvcache.engine.engine import Engine
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ConfigError, StoreError

# What is asked of whom, in which order: one user request, worked on by three agents in ten calls. A script is a
# generator: it yields a prompt and is sent the answer's token ids, since later prompts contain earlier answers. Each
# agent has a conversation of its own behind the shared text, and every follow-up extends it by the answer before and
# a new message, as agent programs do.


@dataclass(frozen=True, slots=True)
class Prompt:
    agent: str
    token_ids: list[int]


Script = Generator[Prompt, list[int], None]


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """One call: `message` may name earlier answers in braces; the answer is known as `answer` from then on."""

    agent: str
    message: str
    answer: str


USER_REQUEST = (
    "Our three assistants read the same long instructions before every answer, and each of our servers computes them "
    "again. Set up kvcache so that they are computed once, even after a restart."
)

SCRIPT_STEPS: Sequence[ScriptStep] = (
    ScriptStep("planner", f"You are the planner. The user asks: {USER_REQUEST} Which steps are needed?", "plan"),
    ScriptStep("critic", "You are the critic. The plan is: {plan} What is its weakest step?", "doubt"),
    ScriptStep("planner", "The critic says: {doubt} Give the plan again, with that step made better.", "better"),
    ScriptStep("executor", "You are the executor. The plan is: {better} Carry out the first step.", "first"),
    ScriptStep("executor", "Now the second step: choose the tiers.", "second"),
    ScriptStep("critic", "The executor did this: {first} And this: {second} What is missing?", "missing"),
    ScriptStep("executor", "The critic says: {missing} Add what is missing.", "third"),
    ScriptStep("executor", "Now test it: restart the server, and tell what you see.", "test"),
    ScriptStep("critic", "The executor reports: {third} And: {test} Is the user's request met?", "verdict"),
    ScriptStep("planner", "The critic's verdict: {verdict} Write the final answer for the user.", "final"),
)


def agent_script(tokenizer: Tokenizer, shared_text: Mapping[str, str]) -> Script:
    """The multi-agent case; `shared` is what stands before every conversation, part by part."""
    system = {"role": "system", "content": "\n\n".join(shared_text.values())}
    talks: dict[str, list[dict[str, str]]] = {step.agent: [system] for step in SCRIPT_STEPS}
    answers: dict[str, str] = {}
    for step in SCRIPT_STEPS:
        talk = talks[step.agent]
        talk.append({"role": "user", "content": step.message.format(**answers)})
        answer = tokenizer.decode((yield Prompt(step.agent, tokenizer.chat(talk))))
        talk.append({"role": "assistant", "content": answer})
        answers[step.answer] = answer


def recorded_script(prompts: Sequence[Prompt]) -> Script:
    """Prompts that are known beforehand: no answer changes them."""
    for prompt in prompts:
        _ = yield prompt


TIERS = ("hbm", "host", "nvme")


@dataclass(frozen=True, slots=True)
class ModelCall:
    """`reused`: prompt tokens that were not computed, by the tier they came from."""

    agent: str
    prompt_tokens: int
    reused: Mapping[str, int]
    ttft_s: float
    total_s: float
    token_ids: list[int]
    text: str

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


@dataclass(slots=True)
class DemoPass:
    """`planned` calls, of which those in `calls` were played."""

    name: str
    about: str
    planned: int
    calls: list[ModelCall] = field(default_factory=list)
    start_s: float = 0.0  # of a new process: until it could take the first call; no part of any call

    @property
    def request_s(self) -> float:
        """Time of all calls, the whole user request where all were played."""
        return sum(call.total_s for call in self.calls)

    @property
    def prompt_tokens(self) -> int:
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def saved(self) -> float:
        """The part of the prompt tokens that was not computed."""
        return sum(call.reused_tokens for call in self.calls) / self.prompt_tokens if self.calls else 0.0

    def ttft_ms(self, percentile: float) -> float:
        """Between neighbours by distance, as numpy does."""
        return float(np.percentile([1000 * call.ttft_s for call in self.calls], percentile))

    def times_faster(self, other: DemoPass, time: Literal["ttft_s", "total_s"]) -> float:
        """How many times faster than the other in all, over the calls that both played."""
        both = list(zip(self.calls, other.calls, strict=False))
        mine, theirs = (sum(getattr(pair[i], time) for pair in both) for i in (0, 1))
        return float(theirs / mine)

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "planned": self.planned,
            "start_s": self.start_s,
            "prompt_tokens": self.prompt_tokens,
            "saved": self.saved,
            "ttft_ms": {f"p{p}": self.ttft_ms(p) for p in (50, 95, 99)},
            "request_s": self.request_s,
            "calls": [asdict(call) for call in self.calls],
        }


def run_script(script: Script, engine: Engine, tokenizer: Tokenizer, params: SamplingParams) -> Iterator[ModelCall]:
    """Each call as it ends; a caller that stops asking ends the play."""
    answer: list[int] | None = None
    while True:
        try:
            prompt = next(script) if answer is None else script.send(answer)
        except StopIteration:
            return
        [result] = engine.generate([prompt.token_ids], params)
        answer = result.token_ids
        yield ModelCall(
            agent=prompt.agent,
            prompt_tokens=result.prompt_tokens,
            reused=result.reused,
            ttft_s=result.ttft_s,
            total_s=result.total_s,
            token_ids=answer,
            text=tokenizer.decode(answer),
        )


def within_budget(calls: Iterator[ModelCall], budget_s: float | None) -> Iterator[ModelCall]:
    """The calls that begin before the budget is spent; at least one."""
    end = None if budget_s is None else time.monotonic() + budget_s
    for call in calls:
        yield call
        if end is not None and time.monotonic() >= end:
            return


def differences(passes: Sequence[DemoPass]) -> list[str]:
    """Where a pass answered otherwise than the first did: its first such call, one line a pass."""
    found = []
    for other in passes[1:]:
        for number, (one, two) in enumerate(zip(passes[0].calls, other.calls, strict=False), 1):
            if one.token_ids != two.token_ids:
                found.append(f"call {number}: {other.name} answered {two.text!r}, {passes[0].name} {one.text!r}")
                break
    return found


# Recorded prompts: a file of JSON lines, gzip or not, each an object with the prompt in `input`.

_GZIP = b"\x1f\x8b"


def read_prompts(path: Path, tokenizer: Tokenizer, *, longest_tokens: int) -> tuple[list[Prompt], int]:
    """The prompts of at most `longest_tokens`, in the order of the file, and how many were left out for being longer.

    Each is the user's message of a conversation. Its agent is the line's `session_id`, shortened, where it has one.
    """
    prompts, longer = [], 0
    for number, line in enumerate(_lines(path), 1):
        said = _object(path, number, line)
        token_ids = tokenizer.chat([{"role": "user", "content": said["input"]}])
        if len(token_ids) <= longest_tokens:
            prompts.append(Prompt(str(said.get("session_id", ""))[:8], token_ids))
        else:
            longer += 1
    if not prompts:
        raise ConfigError(
            f"--prompts {path}: no prompts of at most {longest_tokens} tokens; {longer} longer: give shorter ones"
        )
    return prompts, longer


def _lines(path: Path) -> Iterator[str]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, ValueError) as error:  # not there; cut short; not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prompts {path}: {reason}: expected a file of JSON lines, gzip or not") from None
    return (line for line in text.split("\n") if line.strip())


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
        if said["input"].encode():  # which refuses half of a character
            return dict(said)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f"--prompts {path}, line {number}: expected an object with the prompt's text in `input`")


# The demo's daemon: a process of its own, that ends with the demo and not with the engines that it plays.


def environment() -> dict[str, str]:
    """The variables of a child that imports `examples`, from whatever directory the demo was started."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


@contextmanager
def run_daemon(directory: Path) -> Iterator[str]:
    """Where it listens. Its drive is `directory`."""
    with tempfile.TemporaryDirectory(prefix="kvcache-") as place:
        words = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", f"{place}/demo.socket"]
        environ = {**os.environ, "KVCACHE_NVME__PATH": str(directory)}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None, "it is a pipe"
            try:
                if not process.stdout.readline():
                    raise StoreError(f"the daemon ended with code {process.wait()}: it says why above")
                yield f"unix:{place}/demo.socket"
            finally:
                process.terminate()


# The text that the agents share: this project's own documentation, read from the sources that are installed. Three
# parts in the proportion 2 : 3 : 5 in tokens: a system prompt (what the rooms are), tool descriptions (functions with
# what they promise) and examples (questions with their answers). Nothing is imported for it, so that it is the same
# whatever extras are there.

PROPORTION = {"system prompt": 2, "tool descriptions": 3, "examples": 5}
SHARED_TOKENS = 4200

_PACKAGE = Path(kvcache.__file__).parent
_RULES = "You work in a team of three agents: a planner, a critic and an executor. Answer in one short sentence.\n"


@dataclass(frozen=True, slots=True)
class DocPage:
    """The documentation of one module, class or function."""

    kind: type[ast.AST]
    name: str  # of a function with its arguments
    text: str

    @property
    def claim(self) -> str:
        """Its first paragraph, on one line."""
        return self.text.partition("\n\n")[0].replace("\n", " ")


def doc_pages() -> Iterator[DocPage]:
    """What is documented in the package, module by module in order of name."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        text_parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        name = ".".join(text_parts[:-1] if text_parts[-1] == "__init__" else text_parts)
        yield from _pages(name, ast.parse(path.read_text(encoding="utf-8")))


def _pages(name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[DocPage]:
    text = ast.get_docstring(node)
    if text:
        yield DocPage(
            type(node), f"{name}({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else name, text
        )
    for inner in node.body:
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)) and not inner.name.startswith("_"):
            yield from _pages(f"{name}.{inner.name}", inner)


def text_parts() -> dict[str, str]:
    """The three parts, each longer than it will be."""
    every = list(doc_pages())
    modules = [page for page in every if page.kind is ast.Module]
    functions = [page for page in every if page.kind is ast.FunctionDef]
    return {
        "system prompt": _RULES + "".join(f"{page.name}: {page.claim}\n" for page in modules),
        "tool descriptions": "".join(f"{page.name}: {page.text}\n" for page in functions),
        "examples": "".join(f"Question: what is {page.name}?\nAnswer: {page.text}\n\n" for page in every),
    }


def shared_text(tokenizer: Tokenizer, tokens: int = SHARED_TOKENS) -> dict[str, str]:
    """The three parts, cut to their share of `tokens`."""
    whole = sum(PROPORTION.values())
    return {
        name: _cut(tokenizer, name, text, tokens * PROPORTION[name] // whole) for name, text in text_parts().items()
    }


def _cut(tokenizer: Tokenizer, name: str, text: str, tokens: int) -> str:
    ids = tokenizer.encode(text)
    if len(ids) < tokens:
        raise ConfigError(f"{name} of {len(ids)} tokens: expected {tokens} from the sources of kvcache in {_PACKAGE}")
    return tokenizer.decode(ids[:tokens])
