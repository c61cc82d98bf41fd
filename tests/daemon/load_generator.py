"""A client that stores and loads until a test kills it: `python -m tests.daemon.load_generator WHERE SEED`."""

from __future__ import annotations

import random
import sys

import kvcache
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to
from tests.daemon.in_process_daemon import PATIENT


def main(where: str, seed: int) -> None:
    rng, engine = random.Random(seed), Engine(LAYOUT)
    engine.fill(seed, list(range(32)))
    with kvcache.open(where, **PATIENT) as cache:
        handle = bound_to(cache)
        print("begins", flush=True)
        while True:
            tokens = [seed, rng.randrange(8), *range(126)]
            with handle.request() as r:
                hit = r.match(tokens)
                r.admit()
                r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
                r.store(engine.described, engine.ids(list(range(32)))).wait(rng.choice((0, 30)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
