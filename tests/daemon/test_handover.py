"""One daemon in the place of another: what is in host memory stays there, or is on the drive; never another's block."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.daemon.client.autostart import find_or_start
from kvcache.daemon.client.control import send_command
from kvcache.daemon.protocol import PROTOCOL_VERSION
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.daemon.server.handover import take_over
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, reached, store
from tests.daemon.test_kill import BLOCKS, check_durable, durable, working
from tests.daemon.test_leases import Slow
from tests.daemon.test_tenant import written

Make = Callable[..., DaemonProcess]
PROMPT = list(range(32))  # eight blocks
ROOT = Path(__file__).parents[2]


ASK = f"""
import os, sys
from pathlib import Path
from kvcache.daemon.server.handover import take_over
from kvcache.daemon.wire import Wire
if sys.argv[2].isdigit():
    os.setuid(int(sys.argv[2]))
wire = Wire.connect(sys.argv[1], 30)
wire.send({{"op": "hello", "version": {PROTOCOL_VERSION}, "role": "heir"}})
print(wire.receive(30)[0])
take_over(Path(sys.argv[1]))
"""
"""Asks to be the heir, as any user: first without a look at who is there."""


def tiers(handle: Any, tokens: list[int]) -> dict[str, int]:
    with handle.request() as r:
        return dict(r.match(tokens).by_tier)


@pytest.mark.parametrize("nvme", [False, True])
def test_a_handover_keeps_the_blocks_in_host_memory(make_daemon: Make, nvme: bool) -> None:
    daemon = make_daemon(nvme=nvme).start()
    with daemon.open() as cache:
        handle = bound_to(cache)
        expected = store(handle, PROMPT, 1)
        r = handle.request(id="open")
        assert r.match(PROMPT).blocks == 8
        successor = daemon.successor().start("--replace")
        code, said = daemon.wait_exit()
        assert code == 0, said
        reached(cache)
        assert dict(r.match().by_tier) == {"host": 8}, "an open request goes on"
        r.close()
        assert load(handle, PROMPT) == expected
        other = store(handle, list(range(100, 132)), 2)  # into the same extents
        assert load(handle, list(range(100, 132))) == other
        assert load(handle, PROMPT) == expected
        assert cache.flush(60)
        assert cache.check() == []
        daemon = successor.successor().start("--replace")  # and so on
        assert successor.wait_exit()[0] == 0
        reached(cache)
        assert tiers(handle, PROMPT) == {"host": 8}
        assert load(handle, PROMPT) == expected
        assert load(handle, list(range(100, 132))) == other
        assert cache.check() == []
    assert daemon.terminate()[0] == 0


def test_a_handover_keeps_pins(make_daemon: Make, runtime: Path) -> None:
    daemon = make_daemon(CONTROL__ENABLED="true", HOST__CAPACITY_BYTES="2MiB", HOST__SLAB_BYTES="512KiB")
    daemon.environ["XDG_RUNTIME_DIR"] = str(runtime.parent)
    daemon.start()
    with daemon.open() as cache:
        handle = bound_to(cache)
        expected = store(handle, PROMPT, 1)
        (control,) = runtime.glob("*.sock")
        kept = send_command(control, "pin", ids=np.array(PROMPT, "<u4").tobytes(), seconds=3600)["pins"]
        assert [pin["tokens"] for pin in kept] == [len(PROMPT)]
        successor = daemon.successor().start("--replace")
        assert daemon.wait_exit()[0] == 0
        reached(cache)
        (control,) = runtime.glob("*.sock")
        assert send_command(control, "pin")["pins"] == kept
        for seed in range(2, 32):  # more than all of its memory
            store(handle, [seed * 100 + i for i in range(32)], seed)
        assert load(handle, PROMPT) == expected
        assert send_command(control, "unpin", pin=kept[0]["pin"])["pins"] == []
    assert successor.terminate()[0] == 0


def test_a_handover_without_a_daemon_starts_normally(make_daemon: Make) -> None:
    daemon = make_daemon().start("--replace")
    with daemon.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
        assert load(bound_to(cache), PROMPT) == expected
    again = daemon.successor().run()
    assert again.returncode != 0, "without the word no daemon is replaced"
    assert "serves it" in again.stderr


def test_a_handover_waits_for_a_daemon_that_is_ending(make_daemon: Make) -> None:
    daemon = make_daemon(nvme=True).start()
    with daemon.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
    assert daemon.process is not None
    daemon.process.terminate()
    successor = daemon.successor().start("--replace")
    with successor.open() as cache:
        assert load(bound_to(cache), PROMPT) == expected
    assert daemon.wait_exit()[0] == 0


@pytest.mark.parametrize("what", ["table", "refuses", "silent"])
def test_another_version_leaves_only_the_drive(make_daemon: Make, what: str) -> None:
    """Its table is another, it knows of no heirs, or it just ends."""
    daemon = make_daemon(nvme=True)
    daemon.wrapper = [sys.executable, "-m", "tests.daemon.other_version_daemon", what]
    daemon.start()
    with daemon.open() as cache:
        handle = bound_to(cache)
        expected = store(handle, PROMPT, 1)
        assert cache.flush(60)
        successor = daemon.successor(LOG__FORMAT="text").start("--replace")
        assert daemon.wait_exit()[0] == 0
        reached(cache)
        assert tiers(handle, PROMPT) == {"nvme": 8}
        assert load(handle, PROMPT) == expected
        assert cache.check() == []
    code, said = successor.terminate()
    assert code == 0
    assert "taken over" in said or "hands over nothing" in said


def test_a_smaller_arena_takes_the_blocks_that_fit(make_daemon: Make) -> None:
    daemon = make_daemon(nvme=True).start()
    with daemon.open() as cache:
        handle = bound_to(cache)
        expected = {seed: store(handle, [seed, *range(255)], seed) for seed in range(30)}  # 22 MiB
        assert cache.flush(60)
        successor = daemon.successor(HOST__CAPACITY_BYTES="8MiB").start("--replace")
        assert daemon.wait_exit()[0] == 0
        reached(cache)
        assert tiers(handle, [29, *range(255)]) == {"host": 64}, "what was used last"
        stats = cache.stats()["tiers"]["host"]
        assert 4 << 20 <= stats["used_bytes"] <= stats["capacity_bytes"] == 8 << 20
        for seed, blocks in expected.items():
            assert load(handle, [seed, *range(255)]) == blocks
        assert cache.check() == []
    assert successor.terminate()[0] == 0


def test_an_arena_without_a_set_size_keeps_its_size(make_daemon: Make) -> None:
    daemon, sizes = make_daemon(), []
    del daemon.environ["KVCACHE_HOST__CAPACITY_BYTES"]
    daemon.start()
    with daemon.open() as cache:
        store(bound_to(cache), PROMPT, 1)
        sizes.append(cache.stats()["tiers"]["host"]["capacity_bytes"])
        daemon.successor().start("--replace")
        reached(cache)
        sizes.append(cache.stats()["tiers"]["host"]["capacity_bytes"])
    assert sizes[0] == sizes[1]


def test_a_handover_keeps_tenants_separate(make_daemon: Make) -> None:
    """Those that map and those whose bytes are copied."""
    daemon, tokens = make_daemon(), {name: new_token() for name in ("acme", "beta")}
    rows = {name: {"tokens": [token_hash(token)]} for name, token in tokens.items()}
    rows["beta"]["share"] = "copy"  # type: ignore[assignment]
    rows["*"] = {"users": [os.geteuid()]}  # type: ignore[dict-item]
    daemon.environ["KVCACHE_DAEMON__TENANTS_FILE"] = str(written(daemon.directory / "tenants", **rows))
    daemon.start()
    for name, token in tokens.items():
        (daemon.directory / name).write_text(token)

    def opened(name: str) -> Any:
        return daemon.open(token_file=str(daemon.directory / name))

    with opened("acme") as acme, opened("beta") as beta:
        expected = [store(bound_to(cache), PROMPT, seed) for seed, cache in enumerate((acme, beta))]
        hidden = [777, *range(63)]
        secret = store(bound_to(acme), hidden, 7)
        daemon.successor().start("--replace")
        assert daemon.wait_exit()[0] == 0
        for cache in (acme, beta):
            reached(cache)
        assert [load(bound_to(cache), PROMPT) for cache in (acme, beta)] == expected
        assert load(bound_to(acme), hidden) == secret
        assert tiers(bound_to(beta), hidden) == {}
        for number in range(4):  # each goes on in its own extents
            for cache in (acme, beta):
                store(bound_to(cache), [900 + number, *range(63)], number)
        assert [load(bound_to(cache), PROMPT) for cache in (acme, beta)] == expected
    with daemon.open() as operator:
        assert operator.check() == []


def test_an_earlier_reader_gets_a_miss_and_no_other_block(make_daemon: Make) -> None:
    daemon = make_daemon(HOST__CAPACITY_BYTES="4MiB", HOST__SLAB_BYTES="1MiB", DAEMON__DRAIN_S=0.2).start()
    slow, engine = Slow(), Engine(LAYOUT)
    with daemon.open() as cache, daemon.open() as other:
        handle = bound_to(cache)
        store(handle, PROMPT, 1)
        cache.copiers = slow
        with handle.request() as r:
            assert r.match(PROMPT).blocks == 8
            transfer = r.load(8, engine.described, engine.ids(list(range(8))))
            assert slow.entered.wait(60)
            daemon.successor().start("--replace")
            assert daemon.wait_exit()[0] == 0
            reached(other)
            for turn in range(12):  # more than host can have: the slots that are read are given out again
                store(bound_to(other), [1000 + turn, *range(255)], turn)
            assert tiers(bound_to(other), PROMPT) == {}
            slow.go.set()
            assert transfer.wait(60)
            assert Outcome.DONE not in transfer.outcomes
        assert other.check() == []


def test_an_earlier_writer_changes_no_other_block(make_daemon: Make) -> None:
    """It still maps what it was lent: that extent stays behind."""
    daemon = make_daemon(HOST__CAPACITY_BYTES="4MiB", HOST__SLAB_BYTES="1MiB", DAEMON__DRAIN_S=0.2).start()
    slow, engine = Slow(), Engine(LAYOUT)
    engine.fill(9, list(range(8)))
    with daemon.open() as cache, daemon.open() as other:
        first = {turn: store(bound_to(other), [2000 + turn, *range(127)], turn) for turn in range(4)}
        handle = bound_to(cache)
        cache.copiers = slow
        with handle.request() as r:
            r.match(PROMPT)
            transfer = r.store(engine.described, engine.ids(list(range(8))))
            assert slow.entered.wait(60)
            daemon.successor().start("--replace")
            assert daemon.wait_exit()[0] == 0
            reached(other)
            there = [turn for turn in first if tiers(bound_to(other), [2000 + turn, *range(127)])]
            assert 0 < len(there) < 4, "what is in other extents"
            then = {turn: store(bound_to(other), [3000 + turn, *range(127)], turn) for turn in range(6)}
            slow.go.set()
            assert transfer.wait(60)
            assert Outcome.DONE not in transfer.outcomes
        for tokens, blocks in [([2000 + t], first[t]) for t in first] + [([3000 + t], then[t]) for t in then]:
            found = load(bound_to(other), [*tokens, *range(127)])
            assert found == blocks[: len(found)]
        assert tiers(bound_to(other), PROMPT) == {}
        assert other.check() == []


def test_a_kill_during_a_handover_gives_no_wrong_block(make_daemon: Make, request: pytest.FixtureRequest) -> None:
    """The old one, the new one, or both; engines go on all the while."""
    kills, rng = 40 if request.config.getoption("--long") else 5, random.Random(3)
    daemon = make_daemon(nvme=True, DAEMON__DRAIN_S=1).start()
    with daemon.open() as cache, working(cache) as workers:
        for i in range(kills):
            for worker in workers:
                worker.wait_turns(rng.randrange(1, 12))
            sure = durable(cache, workers)
            successor = daemon.successor().launch("--replace")
            workers[0].wait_turns(rng.randrange(1, 300))
            for each in {0: (daemon,), 1: (successor,), 2: (daemon, successor)}[i % 3]:
                each.kill()
            if i % 3 == 0:
                successor.wait_serving()
            else:  # whatever the old one was told by then, it is replaced
                successor = daemon.successor().start("--replace")
            daemon.wait_exit()
            daemon = successor
            reached(cache)
            with daemon.open() as other:
                assert other.check() == []
                check_durable(other, workers, sure)


def test_clients_continue_through_many_handovers(make_daemon: Make, request: pytest.FixtureRequest) -> None:
    turns = 20 if request.config.getoption("--long") else 3
    daemon = make_daemon().start()
    with daemon.open() as cache:
        with working(cache) as workers:
            for _ in range(turns):
                for worker in workers:
                    worker.wait_turns(30)
                successor = daemon.successor().start("--replace")
                assert daemon.wait_exit()[0] == 0
                daemon = successor
                reached(cache)
        for worker in workers:  # there is no drive: what is still there came through memory
            assert any(tiers(worker.handle, worker.tokens(prompt)) == {"host": BLOCKS} for prompt in worker.stored)
        assert cache.check() == []


def test_an_autostarted_daemon_hands_over(make_daemon: Make) -> None:
    daemon = make_daemon()
    environ = {**daemon.environ, "XDG_RUNTIME_DIR": str(daemon.directory)}
    del environ["KVCACHE_NVME__PATH"]
    where = find_or_start("engine", environ=environ, linger_s=30, nvme__enabled=False)
    daemon.socket, daemon.endpoint, daemon.environ = Path(where.removeprefix("unix:")), where, environ
    with daemon.open(engine="engine") as cache:
        expected = store(bound_to(cache), PROMPT, 1)
        successor = daemon.successor()
        successor.socket = daemon.socket
        successor.start("--replace", "--linger-s", "30")
        reached(cache)
        assert tiers(bound_to(cache), PROMPT) == {"host": 8}
        assert load(bound_to(cache), PROMPT) == expected
    assert successor.terminate()[0] == 0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root can be another user")
def test_another_user_cannot_take_over(make_daemon: Make) -> None:
    daemon = make_daemon(DAEMON__MODE="666").start()
    for path in (daemon.directory.parent, daemon.directory):
        path.chmod(0o755)
    successor = daemon.successor()
    successor.wrapper = [sys.executable, "-c", ASK, str(daemon.socket), "54321"]
    done = successor.run()
    assert "'access'" in done.stdout, done.stderr
    assert "AccessError" in done.stderr
    assert daemon.process is not None
    assert daemon.process.poll() is None
    with daemon.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
        assert load(bound_to(cache), PROMPT) == expected


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="root can make namespaces")
def test_another_container_cannot_take_over(make_daemon: Make) -> None:
    """Where the same number is another user."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    daemon = make_daemon().start()
    with daemon.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
        successor = daemon.successor()
        successor.wrapper = words
        done = successor.run("--replace")
        assert done.returncode != 0
        assert "namespaces" in done.stderr
        successor.wrapper = [*words, sys.executable, "-c", ASK, str(daemon.socket)]
        assert "'access'" in successor.run().stdout
        assert daemon.process is not None
        assert daemon.process.poll() is None
        assert load(bound_to(cache), PROMPT) == expected


def test_a_network_client_cannot_take_over(make_daemon: Make) -> None:
    daemon = make_daemon(tcp=True).start()
    wire = daemon.connect()
    try:
        wire.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "heir"})
        assert wire.receive(30)[0]["error"] == "access"
    finally:
        wire.close()
    with daemon.open() as cache:
        store(bound_to(cache), PROMPT, 1)
        assert tiers(bound_to(cache), PROMPT) == {"host": 8}


def test_a_refused_handover_starts_no_second_daemon(make_daemon: Make, tmp_path: Path) -> None:
    """Where the new one's settings make no sense it says so before anybody is asked to end."""
    daemon = make_daemon().start()
    bad = daemon.successor(DAEMON__TENANTS_FILE=tmp_path / "missing").run("--replace")
    assert bad.returncode != 0
    assert daemon.process is not None
    assert daemon.process.poll() is None
    assert take_over(tmp_path / "nobody") is None
    with daemon.open() as cache:
        assert cache.check() == []
