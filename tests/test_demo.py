"""The demo: what it asks of which part, what it reports, and the whole of it with a tiny model."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo import breaking, stage
from examples.demo import run as play
from examples.demo import show as report
from examples.demo.__main__ import application
from examples.demo.run import DemoPass, ModelCall, read_prompts
from kvcache.cli import main as frame
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ConfigError
from tests.engine import tiny_model

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "examples.demo"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One token a byte: the agents' messages are long in it."""
    return tiny_model.make(tmp_path_factory.mktemp("model"), "smollm2", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer(model)


def call(*token_ids: int, prompt: int = 100, reused: int = 0, ttft_s: float = 1.0, total_s: float = 2.0) -> ModelCall:
    return ModelCall("planner", prompt, {"host": reused}, ttft_s, total_s, list(token_ids), "text")


def made(name: str, *calls: ModelCall, planned: int = 2) -> DemoPass:
    return DemoPass(name, "", planned, list(calls))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as left:
        frame.run(application)
    return int(left.value.code or 0)


def test_the_shared_text_has_the_requested_share(tokenizer: Tokenizer) -> None:
    shared = play.shared_text(tokenizer, 5000)
    assert {name: len(tokenizer.encode(part)) for name, part in shared.items()} == {
        "system prompt": 1000,
        "tool descriptions": 1500,
        "examples": 2500,
    }
    assert "kvcache.block" in shared["system prompt"]
    assert "kvcache.open(where" in shared["tool descriptions"]


def test_more_text_than_the_documentation_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="expected 2000000 "):
        play.shared_text(tokenizer, 10_000_000)


def test_agents_share_the_text_and_follow_up_on_real_answers(tokenizer: Tokenizer) -> None:
    playing = play.agent_script(tokenizer, play.shared_text(tokenizer))
    said: list[play.Prompt] = []
    answers: list[str] = []
    prompt = next(playing, None)
    while prompt is not None:
        said.append(prompt)
        answers.append(f"answer number {len(answers)}")
        try:
            prompt = playing.send(tokenizer.encode(answers[-1]))
        except StopIteration:
            prompt = None
    assert len(said) == len(answers) >= 10
    assert {prompt.agent for prompt in said} == {"planner", "critic", "executor"}
    first = tokenizer.decode(said[0].token_ids)
    follow_ups = 0
    for i, prompt in enumerate(said):
        assert prompt.token_ids[: play.SHARED_TOKENS] == said[0].token_ids[: play.SHARED_TOKENS]
        before = [j for j in range(i) if said[j].agent == prompt.agent]
        if before:
            follow_ups += 1
            known = said[before[-1]].token_ids + tokenizer.encode(answers[before[-1]])
            assert prompt.token_ids[: len(known)] == known
    assert follow_ups == len(said) - 3
    assert play.USER_REQUEST in first
    for answer in answers[:-1]:
        assert any(answer in tokenizer.decode(prompt.token_ids) for prompt in said), "an answer that no prompt contains"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_recorded_prompts_that_fit(tmp_path: Path, tokenizer: Tokenizer, pack: object) -> None:
    lines = [{"input": "short"}, {"input": "long" * 100}, {"input": "other", "session_id": "0123456789", "x": 1}]
    path = tmp_path / "prompts"
    path.write_bytes(pack("\n".join(map(json.dumps, lines)).encode() + b"\n\n"))  # type: ignore[operator]
    prompts, longer = read_prompts(path, tokenizer, longest_tokens=100)
    assert [prompt.agent for prompt in prompts] == ["", "01234567"]
    assert ["short" in tokenizer.decode(prompt.token_ids) for prompt in prompts] == [True, False]
    assert longer == 1
    assert list(play.recorded_script(prompts)) == prompts


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "expected a file of JSON lines"),
        (gzip.compress(b'{"input": "x"}', mtime=0)[:-9], "expected a file of JSON lines"),
        (b'{"input": "x"}\n{"input": \n', "line 2: expected an object"),
        (b"[]", "line 1: expected an object"),
        (b'{"input": 3}', "line 1: expected an object"),
        (b'{"input": "\\ud800"}', "line 1: expected an object"),
        (b"", "no prompts of at most 100 tokens; 0 longer"),
        (b'{"input": "' + b"x" * 200 + b'"}', "no prompts of at most 100 tokens; 1 longer"),
    ],
)
def test_prompts_that_cannot_be_played(tmp_path: Path, tokenizer: Tokenizer, content: bytes | None, text: str) -> None:
    path = tmp_path / "prompts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_prompts(path, tokenizer, longest_tokens=100)
    assert text in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_figures_of_a_pass() -> None:
    this = made("cold", call(1, reused=50, ttft_s=0.1), call(2, reused=100, ttft_s=0.3, total_s=4.0))
    assert (this.prompt_tokens, this.saved, this.request_s) == (200, 0.75, 6.0)
    assert this.ttft_ms(50) == pytest.approx(200)


def test_only_calls_that_both_played_are_compared() -> None:
    without = made("without", call(1, ttft_s=8.0, total_s=9.0))
    cold = made("cold", call(1, ttft_s=2.0, total_s=3.0), call(2, ttft_s=100.0, total_s=100.0))
    assert cold.times_faster(without, "ttft_s") == 4
    assert cold.times_faster(without, "total_s") == 3


def test_a_time_budget_allows_at_least_one_call() -> None:
    def calls() -> Iterator[ModelCall]:
        while True:
            yield call(1)

    assert len(list(play.within_budget(calls(), 0.0))) == 1
    assert len(list(play.within_budget(iter([call(1), call(2)]), None))) == 2


@pytest.mark.parametrize(("dtype", "sound"), [("fp32", False), ("bf16", True)])
def test_different_answers_fail_the_demo(dtype: str, sound: bool) -> None:
    passes = [made("without", call(1)), made("cold", call(1), call(2)), made("warm", call(3), call(2))]
    said, verdict = report.verdict(dtype, passes)
    assert verdict == sound
    assert "call 1: warm" in said
    assert "cold" not in said
    assert report.verdict(dtype, passes[:2])[1]


def test_a_failed_demo_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Other:
        notes = ("a note",)
        calls = 1

        def __init__(self, wish: stage.DemoOptions) -> None:
            self.wish = wish

        def passes(self) -> Iterator[tuple[DemoPass, Iterator[ModelCall]]]:
            for name, token in (("without", 1), ("cold", 1), ("warm", 2), ("restarted", 1)):
                yield made(name, planned=1), iter([call(token)])

    monkeypatch.setattr(stage, "DemoEnvironment", Other)
    monkeypatch.setenv("KVCACHE_DIR", str(tmp_path))
    assert run(monkeypatch, "--json", str(tmp_path / "demo.json")) == 1
    assert "FAILED" in capsys.readouterr().out
    assert json.loads((tmp_path / "demo.json").read_text())["same_answers"] is False


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "/nowhere"), "'/nowhere': not found"),
        (("--plot", "demo.txt"), "--plot demo.txt: expected a name that ends in .png"),
        (("--json", "/nowhere/demo.json"), "--json /nowhere/demo.json: cannot be written"),
        (("--prompts", "/nowhere"), "--prompts /nowhere: No such file"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    arguments: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.setenv("KVCACHE_DIR", str(tmp_path))
    assert run(monkeypatch, "--model", model, *arguments) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def played(model: str, place: Path, *arguments: str) -> tuple[dict[str, dict], str]:
    """The whole command, as it is typed; its passes by name and what it printed."""
    ours = {"PYTHONPATH": str(ROOT), "KVCACHE_DIR": str(place), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    ours["KVCACHE_PLAN__ENABLED"] = "false"  # so small a model may compute sooner than it loads
    command = [*COMMAND, "--model", model, "--json", str(place / "demo.json"), *arguments]
    done = subprocess.run(command, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads((place / "demo.json").read_text())
    assert document["same_answers"]
    assert {path.name for path in place.iterdir()} >= {"demo.json", "demo.png"}
    assert (place / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert list(place.glob("demo-*")) == [], "its directory stays behind"
    assert max(map(len, done.stdout.splitlines()[2:-3])) <= 100
    return {this["name"]: this for this in document["passes"]}, done.stdout


def test_the_demo_runs_with_a_tiny_model(model: str, tmp_path: Path) -> None:
    passes, printed = played(model, tmp_path, "--quick")
    assert list(passes) == ["without", "cold", "warm", "restarted"]
    assert all(this["planned"] == len(play.SCRIPT_STEPS) for this in passes.values())
    first = {name: this["calls"][0]["reused"] for name, this in passes.items()}
    prompt = passes["cold"]["calls"][0]["prompt_tokens"]
    whole = (prompt - 1) // 16 * 16
    assert first == {"without": {}, "cold": {}, "warm": {"host": whole}, "restarted": {"nvme": whole}}
    assert passes["without"]["saved"] == 0
    assert passes["cold"]["saved"] > 0.5
    assert passes["warm"]["saved"] > 0.95
    assert passes["restarted"]["saved"] > 0.95
    assert passes["restarted"]["start_s"] > 0
    assert printed.count("10/10") >= 3
    assert "All passes gave the same answers" in printed


def test_a_new_process_hits_the_daemons_host_memory(model: str, tmp_path: Path) -> None:
    passes, _ = played(model, tmp_path, "--quick", "--daemon")
    first = {name: this["calls"][0]["reused"] for name, this in passes.items()}
    whole = (passes["cold"]["calls"][0]["prompt_tokens"] - 1) // 16 * 16
    assert first == {"without": {}, "cold": {}, "warm": {"host": whole}, "restarted": {"host": whole}}
    assert passes["restarted"]["saved"] > 0.95


def test_the_demo_runs_with_recorded_prompts(model: str, tmp_path: Path) -> None:
    same = "the same beginning of every prompt, longer than a block of sixteen tokens; "
    lines = [{"input": same + word} for word in ("one", "two", "three", "far too long" * 2000)]
    prompts = tmp_path / "prompts.jsonl.gz"
    prompts.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    passes, printed = played(model, tmp_path, "--prompts", str(prompts), "--directory", str(tmp_path / "nvme"))
    assert "3 prompts, 1 more left out for being longer than 16,336 tokens" in printed
    assert [len(this["calls"]) for this in passes.values()] == [3, 3, 3, 3]
    assert passes["restarted"]["calls"][0]["reused"]["nvme"] > len(same)
    assert list((tmp_path / "nvme").iterdir()), "a directory that was given is kept"


def test_the_break_demo_runs_with_a_tiny_model(model: str, tmp_path: Path) -> None:
    ours = {"PYTHONPATH": str(ROOT), "KVCACHE_DIR": str(tmp_path), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--break", "--model", model, "--json", str(tmp_path / "broken.json")]
    done = subprocess.run(command, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads((tmp_path / "broken.json").read_text())
    assert document["same_answers"]
    trials = {trial["fault"]: trial for trial in document["trials"][1:]}
    assert list(trials) == ["none", *breaking.FAULTS, "the drive is full"]
    whole = (trials["none"]["prompt_tokens"] - 1) // 16 * 16
    loaded = {fault: sum(trial["came"].values()) for fault, trial in trials.items()}
    assert loaded["none"] == loaded["a lost file"] == 0
    assert 0 < loaded["a truncated record"] < loaded["a flipped bit"] < whole
    assert loaded["a killed writer"] == whole
    assert 0 < loaded["the drive is full"] <= whole  # a drive so small that a tiny model fills it cannot be made
    assert trials["a flipped bit"]["noticed"]["refused records (nvme, damaged)"] == 1
    assert "token for token" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]
