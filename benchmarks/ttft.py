"""How long until the first token: of a prompt that is new, and of one whose keys and values are in each tier.

SmolLM2 in float32 (or --model), prompts of the project's own documentation. For each length, in ms:

    engine/ttft/2048/transformers   transformers' prefill, sdpa, the same threads and prompt, to the chosen token
    engine/ttft/2048/cold           a new prompt; peer: transformers
    engine/ttft/2048/hbm            again, from the engine's pool; peer of this and of the next ones: cold
    engine/ttft/2048/host           the pool emptied
    engine/ttft/2048/nvme           a fresh cache over the same directory, in the same process
    engine/ttft/2048/restart        a new process over the same directory; its start does not count

Each is the median of several prompts. All that is found is loaded, whether or not that is sooner. A run in which a tier
did not bring the whole prefix, or in which two first tokens differ, fails. The floors: the operations of a prefill at
the rate of a large product of matrices; a warm prompt reads the weights once, and its keys and values are read from the
drive or copied once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import torch
from harness import Row, flush, options, publish
from harness.hardware_limit import copy_rate, drive_rate, matmul_rate, memory_rate

import kvcache
from examples.demo.run import text_parts
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import Model, load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.tokenizer import Tokenizer
from kvcache.machine import cache_directory

LENGTHS, QUICK_LENGTHS = (512, 2048, 4096), (512, 2048)
REPEATS, QUICK_REPEATS = 5, 3
WAYS = ("transformers", "cold", "hbm", "host", "nvme", "restart")
Prompt = list[int]
Times = dict[tuple[int, str], list[float]]  # seconds, by length and what was measured


class Wrong(SystemExit):
    """What was measured is not what the row's name says: no figure is better than a wrong one."""


class Runs:
    """Measures, and holds each first token against the first one of the same prompt."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._tokens: dict[tuple[int, ...], int] = {}

    def note(self, prompt: Prompt, name: str, seconds: float, token: int, reused: Mapping[str, int], tier: str) -> None:
        expected = {tier: (len(prompt) - 1) // 16 * 16} if tier else {}
        if dict(reused) != expected:
            raise Wrong(f"engine/ttft/{len(prompt)}/{name}: reused {dict(reused)} tokens, expected {expected}")
        if self._tokens.setdefault(tuple(prompt), token) != token:
            raise Wrong(f"engine/ttft/{len(prompt)}/{name}: first token {token}, not that of another way to it")
        self.times.setdefault((len(prompt), name), []).append(seconds)


def first_token(engine: Engine, prompt: Prompt) -> tuple[float, int, Mapping[str, int]]:
    [result] = engine.generate([prompt], SamplingParams(max_tokens=1))
    return result.ttft_s, result.token_ids[0], result.reused


def make_engine(model: Model, cache: kvcache.KVCache | None) -> Engine:
    """Warmed up: the first step of a process pays for more than a step."""
    engine = Engine(
        model,
        cache,
        EngineConfig(pages=model.max_tokens // model.layout.block_tokens, max_batch_tokens=model.max_tokens),
    )
    for length in (64, 17):
        engine.generate([[7] * length], SamplingParams(max_tokens=2))
    return engine


def peer(directory: str) -> Callable[[Prompt], tuple[float, int]]:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()

    def run(prompt: Prompt) -> tuple[float, int]:
        begun = time.perf_counter()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
        return time.perf_counter() - begun, token

    run([7] * 64)
    return run


def prompts(tokenizer: Tokenizer, lengths: Sequence[int], repeats: int) -> list[Prompt]:
    """Text of the documentation, no two with a block in common: each begins elsewhere."""
    ids = tokenizer.encode("\n".join(text_parts().values()))
    starts = iter(range(0, len(ids), 97))
    return [ids[start : start + length] for _ in range(repeats) for length in lengths for start in [next(starts)]]


def measure(model: Model, texts: Sequence[Prompt], directory: Path, restart: Sequence[str]) -> Times:
    runs = Runs()
    transformers = peer(model.directory)
    with closing(kvcache.open(nvme={"path": str(directory)}, plan={"enabled": False})) as cache:
        engine = make_engine(model, cache)
        for i, prompt in enumerate(texts):
            for name in ("cold", "transformers")[:: 1 if i % 2 else -1]:  # neither always comes after the other
                if name == "cold":
                    runs.note(prompt, name, *first_token(engine, prompt), "")
                else:
                    runs.note(prompt, name, *transformers(prompt), {}, "")
            runs.note(prompt, "hbm", *first_token(engine, prompt), "hbm")
            flush(cache)
            engine.pool.clear()
            runs.note(prompt, "host", *first_token(engine, prompt), "host")
    with closing(kvcache.open(nvme={"path": str(directory)}, plan={"enabled": False})) as cache:
        engine = make_engine(model, cache)
        for prompt in texts:
            runs.note(prompt, "nvme", *first_token(engine, prompt), "nvme")
    answer = subprocess.run(restart, input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True).stdout
    for prompt, (seconds, token, reused) in zip(texts, json.loads(answer), strict=True):
        runs.note(prompt, "restart", seconds, token, reused, "nvme")
    return runs.times


def restarted(model: Model, directory: Path) -> None:
    """In the new process: the prompts come in on standard input, their times go out."""
    with closing(kvcache.open(nvme={"path": str(directory)}, plan={"enabled": False})) as cache:
        engine = make_engine(model, cache)
        print(json.dumps([first_token(engine, prompt) for prompt in json.load(sys.stdin)]))


def floors(model: Model, directory: Path) -> Callable[[int, str], float]:
    """The least seconds of a prompt of some length, by what is measured."""
    a = model.architecture
    width = a.heads * a.head_dim
    weights = a.layers * a.hidden * (2 * width + 2 * a.kv_heads * a.head_dim + 3 * a.intermediate)
    head = a.hidden * a.vocab
    operations, memory, copies = matmul_rate(model.dtype), memory_rate(), copy_rate()
    drive = drive_rate(directory)

    def floor(length: int, name: str) -> float:
        if name in {"transformers", "cold"}:
            products = length * weights + length**2 * width * a.layers + head  # half of the attention is masked
            return 2 * products / operations
        read = (weights + head) * model.dtype.itemsize / memory
        kept = model.layout.context_bytes(length)
        return read + kept * {"hbm": 0, "host": 1 / copies, "nvme": 1 / drive, "restart": 1 / drive}[name]

    return floor


def rows(times: Times, lengths: Sequence[int], floor: Callable[[int, str], float]) -> list[Row]:
    found = []
    for length in lengths:
        ms = {name: 1000 * median(times[length, name]) for name in WAYS}
        peers = {"transformers": None, "cold": ms["transformers"]}
        for name in WAYS:
            against = peers.get(name, ms["cold"])
            found.append(
                Row(f"engine/ttft/{length}/{name}", ms[name], "ms", floor=1000 * floor(length, name), peer=against)
            )
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory of safetensors, a GGUF file, or smollm2")
    parser.add_argument("--lengths", type=_lengths, help="lengths of the prompts in tokens, as in 512,2048,4096")
    parser.add_argument("--repeats", type=int, help="prompts of each length")
    parser.add_argument("--restarted", type=Path, help="for this program's own use")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    if arguments.restarted:
        restarted(model, arguments.restarted)
        return
    lengths = arguments.lengths or (QUICK_LENGTHS if arguments.quick else LENGTHS)
    repeats = arguments.repeats or (QUICK_REPEATS if arguments.quick else REPEATS)
    texts = prompts(Tokenizer(model.directory), lengths, repeats)
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ttft-", dir=cache_directory()) as made:
        floor = floors(model, Path(made))
        directory = Path(made, "nvme")
        restart = [sys.executable, __file__, "--model", arguments.model, "--restarted", str(directory)]
        times = measure(model, texts, directory, restart)
    notes = [f"medians of {repeats} prompts each, {torch.get_num_threads()} threads"]
    publish("ttft", rows(times, lengths, floor), arguments.json, notes=notes)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
