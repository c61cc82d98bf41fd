"""Whether the time of an answer tells one tenant what another has stored.

A daemon with two tenants. The victim stores prompts of 64 blocks; the spy knows all of them, and all of the victim's
namespace, and asks for their very signatures among others that were never stored, one at a time in random order,
and times each. Each question comes equally often, so that none is nearer to a processor's caches than another.

    gap/stored        between the medians of what the victim has and of nonsense; floor: of nonsense and nonsense
    told/stored       of a question whose answer's time is all that is known, how much better than a coin the best guess
                      is whether it was the victim's or nonsense, in points of 100; floor: nonsense and nonsense
    told/own          the same for prompts that the spy has stored itself: that a difference would be seen
    asked             a question for nonsense, at the median
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, options, publish

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.block.namespace import Namespace
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=8)
BLOCKS, PROMPTS = 64, 100
FIELDS = {"model": "benchmark", "revision": "1"}


@contextmanager
def daemon(tokens: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Where one listens that knows these tenants, in a process of its own; and a directory."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        directory = Path(name)
        tenants = "".join(f'["{tenant}"]\ntokens = ["{token_hash(token)}"]\n' for tenant, token in tokens.items())
        (directory / "tenants").write_text(tenants)
        settings = {"NVME__ENABLED": "false", "CONTROL__ENABLED": "false", "HOST__CAPACITY_BYTES": "512MiB"}
        settings["DAEMON__TENANTS_FILE"] = str(directory / "tenants")
        environ = {**os.environ, **{f"KVCACHE_{name}": value for name, value in settings.items()}}
        words = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", f"{name}/s"]
        process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if "serving" not in process.stdout.readline():
                raise SystemExit("the daemon did not start")
            yield f"unix:{name}/s", directory
        finally:
            process.terminate()
            process.communicate()


def prompts(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_000, BLOCKS * LAYOUT.block_tokens, np.uint32) for _ in range(PROMPTS)]


def store(handle: Any, asked: list[Any]) -> list[bytes]:
    """The signatures of these, which are there then."""
    tensors = np.zeros((1, 2, BLOCKS, 16, 1, 8), np.uint16)
    pages = [GroupPages.from_tensors(LAYOUT, tensors, axes=("kv", "page", "token", "head", "dim"))]
    packed = []
    for ids in asked:
        with handle.request(deadline_s=60) as r:
            r.match(ids)
            if not r.store(pages, [list(range(BLOCKS))]).wait(60) or r.match().blocks != BLOCKS:
                raise SystemExit("a prompt was not stored")
            packed.append(b"".join(r.signatures))
    return packed


def measure(spy: Any, questions: dict[str, list[bytes]], rounds: int) -> dict[str, np.ndarray]:
    """By kind, seconds of each question."""
    order = [(kind, signatures) for kind, of_kind in questions.items() for signatures in of_kind]
    times: dict[str, list[float]] = {kind: [] for kind in questions}
    rng = random.Random(0)
    with spy.request() as r, spy.cache.connected() as connection:
        number = r.number(connection)
        for turn in range(rounds + 1):
            rng.shuffle(order)
            for kind, signatures in order:
                begun = time.perf_counter()
                found = connection.call("match", request=number, signatures=signatures)["blocks"]
                seconds = time.perf_counter() - begun
                if found != (BLOCKS if kind == "own" else 0):
                    raise SystemExit(f"{found} blocks were found of {kind}")
                if turn:  # the first round warms up
                    times[kind].append(seconds)
    return {kind: np.array(of_kind) for kind, of_kind in times.items()}


def advantage(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of the shares of both that lie below any time: how often, above chance, the best threshold
    tells them apart, in points."""
    edges = np.sort(np.concatenate((one, other)))
    below = [np.searchsorted(np.sort(each), edges, side="right") / len(each) for each in (one, other)]
    return float(50 * np.abs(below[0] - below[1]).max())


def main() -> None:
    arguments = options(__doc__).parse_args()
    rounds = 20 if arguments.quick else 120
    tokens = {"victim": new_token(), "spy": new_token()}
    with daemon(tokens) as (where, directory):
        caches = {}
        for tenant, token in tokens.items():
            (directory / tenant).write_text(token)
            caches[tenant] = kvcache.open(where, token_file=str(directory / tenant), patience_s=30.0)
        victim, spy = (cache.namespace(LAYOUT, **FIELDS) for cache in caches.values())
        known = Namespace(LAYOUT, **FIELDS, tenant="victim", facts=victim.namespace.facts)
        if known.id != victim.id:
            raise SystemExit("the spy does not know the victim's namespace")
        rng = random.Random(1)
        questions = {
            "stored": store(victim, prompts(1)),
            "own": store(spy, prompts(2)),
            "nonsense": [rng.randbytes(32 * BLOCKS) for _ in range(PROMPTS)],
            "more nonsense": [rng.randbytes(32 * BLOCKS) for _ in range(PROMPTS)],
        }
        times = measure(spy, questions, rounds)
        for cache in caches.values():
            cache.close()
    median = {kind: 1e6 * float(np.median(of_kind)) for kind, of_kind in times.items()}
    nothing = times["nonsense"]
    chance = advantage(times["more nonsense"], nothing)
    rows = [
        Row(
            "gap/stored",
            abs(median["stored"] - median["nonsense"]),
            "us",
            floor=abs(median["more nonsense"] - median["nonsense"]),
        ),
        Row("told/stored", advantage(times["stored"], nothing), "points", floor=chance),
        Row("told/own", advantage(times["own"], nothing), "points"),
        Row("asked", median["nonsense"], "us"),
    ]
    publish("timing_side_channel", rows, arguments.json, notes=[f"{len(nothing):,} questions of each kind"])


if __name__ == "__main__":
    main()
