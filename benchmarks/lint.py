"""What `kvcache lint` says of a log of prompts, beside PyPI's kvlint on the same file.

Both cut text by SmolLM2's tokenizer and count blocks of 16. `--kvlint` names the interpreter of an environment that has
kvlint; without, its column stays empty.

    lint/made-up/hit-rate   200 chats of one assistant, with the time and a customer's id in the system prompt
    lint/made-up/moved      the same with what breaks prefixes at the end; peer: after kvlint's own `fix`
    lint/agents/hit-rate    150 prompts of coding agents (`--data`), cut to 60,000 characters
    lint/agents/seconds     how long it takes
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Row, options, publish

from kvcache.engine.checkpoint import resolve_model

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "text" / "agent-sessions.jsonl.gz"
RULE = "Rule {}: answer with care, quote clause {} of the handbook, and never promise what it does not."
Log = list[dict[str, Any]]


def chats(requests: int) -> Log:
    draw = random.Random(1)
    made: Log = []
    for i in range(requests):
        now = f"2026-11-29T{8 + i // 60:02d}:{i % 60:02d}:{draw.randrange(60):02d}Z"
        rules, more = ([RULE.format(n, n + first) for n in range(count)] for first, count in ((100, 40), (300, 12)))
        head = ["You are the assistant of a shop for garden tools.", f"The time is {now}."]
        system = "\n".join([*head, *rules, f"Customer: user_{draw.randrange(10**8):08d}", *more])
        question = f"Where is my order {draw.randrange(10**6)}, and can I still change it?"
        made.append({"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]})
    return made


def agents(path: Path, prompts: int) -> Log:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["input"][:60_000] for line, _ in zip(lines, range(prompts), strict=False)]
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def ours(log: Path, model: Path) -> dict[str, Any]:
    told = run(sys.executable, "-m", "kvcache.cli.main", "lint", log, "--model", model, "--json")
    found: dict[str, Any] = json.loads(told)
    return found


def theirs(python: Path, log: Path, model: Path) -> tuple[float, float]:
    """Hit rates in per cent, by its model of vLLM: of the log, and after its `fix`."""
    with tempfile.TemporaryDirectory() as directory:
        said, fixed = Path(directory, "said.json"), Path(directory, "fixed.jsonl")
        command = (python, "-m", "kvlint.cli")
        rates = []
        run(*command, "fix", log, "--model", model, "--apply", "--out", fixed)
        for file in (log, fixed if fixed.exists() else log):
            run(*command, "analyze", file, "--model", model, "--json", said)
            rates.append(100 * _rate(json.loads(said.read_text())))
        return rates[0], rates[1]


def _rate(report: Any) -> float:
    requests = next(sim["per_request"] for sim in report["sims"] if sim["engine"] == "vllm")
    cached, asked = (sum(request[name] for request in requests) for name in ("cached_tokens", "prompt_tokens"))
    return float(cached / asked)


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def rows(name: str, log: Log, model: Path, python: Path | None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"{name}.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
        begun = time.perf_counter()
        found = ours(path, model)
        seconds = time.perf_counter() - begun
        rate, fixed = theirs(python, path, model) if python is not None else (None, None)
    for text in found["texts"][:3]:
        where = f"{text['what']} at token {text['token']}"
        print(f"{name}: {where}, in {text['requests']} requests, before {text['lost_tokens']} tokens that are alike")
    yield Row(f"lint/{name}/hit-rate", 100 * found["hit_rate"], "%", peer=rate)
    yield Row(f"lint/{name}/moved", 100 * found["moved_hit_rate"], "%", peer=fixed)
    yield Row(f"lint/{name}/repeated", 100 * found["repeated_share"], "%")
    yield Row(f"lint/{name}/seconds", seconds, "s")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--kvlint", type=Path, metavar="PYTHON", help="an interpreter that has kvlint")
    arguments = parser.parse_args()
    model = Path(resolve_model("smollm2"))
    made = [*rows("made-up", chats(40 if arguments.quick else 200), model, arguments.kvlint)]
    if arguments.data.exists():
        made += rows("agents", agents(arguments.data, 30 if arguments.quick else 150), model, arguments.kvlint)
    publish("lint", made, arguments.json)


if __name__ == "__main__":
    main()
