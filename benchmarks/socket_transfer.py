"""What it costs that bytes go over a socket, where a client does not map the daemon's memory.

Both ends on this host, so that the network is the machine's own: 128 MiB in 64 blocks of 2 MiB, from the call until all
are done; the fastest of some. The floor is the same client on the same daemon's socket with the memory mapped.

    store/copy, load/copy   a tenant with share = "copy", over the Unix socket
    store/tcp, load/tcp     TCP on loopback, without TLS
    store/tls, load/tls     TCP on loopback, with TLS
"""

from __future__ import annotations

import os
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
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
BLOCKS = 64
GB = 1e9
SIZE = BLOCKS * LAYOUT.block_bytes()


@contextmanager
def daemon(directory: Path, *words: str, listen: str = "", **settings: str) -> Iterator[str]:
    """Where one listens, in a process of its own: by TCP where `listen` says where."""
    given = {"HOST__CAPACITY_BYTES": "1GiB", "NVME__ENABLED": "false", "CONTROL__ENABLED": "false", **settings}
    if listen:
        given["DAEMON__LISTEN"] = listen
    environ = {**os.environ, **{f"KVCACHE_{name}": value for name, value in given.items()}}
    command = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", str(directory / "s"), *words]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if "serving" not in said:
            raise SystemExit("the daemon did not start")
        yield said.split(", ")[-1].strip() if listen else f"unix:{directory / 's'}"
    finally:
        process.terminate()
        process.communicate()


def certificate(directory: Path) -> dict[str, str]:
    """One of our own for 127.0.0.1, by the command of OpenSSL."""
    key, made = str(directory / "key.pem"), str(directory / "cert.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    words += ["-keyout", key, "-out", made, "-subj", "/CN=kv", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    return {"DAEMON__TLS_CERT_FILE": made, "DAEMON__TLS_KEY_FILE": key}


def rates(where: str, runs: int, **shown: str) -> tuple[float, float]:
    """GB/s of a store and of a load."""
    tensors = [np.random.default_rng(0).integers(0, 1 << 16, (2, BLOCKS, 16, 8, 128), np.uint16) for _ in range(32)]
    pages = [GroupPages.from_tensors(LAYOUT, tensors, axes=("kv", "page", "token", "head", "dim"))]
    ids = [list(range(BLOCKS))]
    stored, loaded = [], []
    with kvcache.open(where, patience_s=30.0, deadline_s=30.0, **shown) as cache:
        handle = cache.namespace(LAYOUT, model="benchmark", revision="1")
        for turn in range(runs + 1):
            with handle.request(deadline_s=30) as r:
                r.match(np.arange(turn, turn + BLOCKS * LAYOUT.block_tokens, dtype=np.uint32))
                stored.append(timed(lambda r=r: r.store(pages, ids)))
                if r.match().blocks != BLOCKS:
                    raise SystemExit("a prompt was not stored")
                loaded.append(timed(lambda r=r: r.load(BLOCKS, pages, ids)))
            handle.clear()
    return SIZE / min(stored[1:]) / GB, SIZE / min(loaded[1:]) / GB


def timed(begin: Any) -> float:
    begun = time.perf_counter()
    transfer = begin()
    if not transfer.wait(60) or transfer.blocks != BLOCKS:
        raise SystemExit("a transfer did not bring all")
    return time.perf_counter() - begun


def main() -> None:
    arguments = options(__doc__).parse_args()
    runs = 4 if arguments.quick else 12
    token = new_token()
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        directory = Path(name)
        (directory / "token").write_text(token)
        file = directory / "tenants"

        def tenants(share: str) -> dict[str, str]:
            file.write_text(f'[one]\ntokens = ["{token_hash(token)}"]\nshare = "{share}"\n')
            return {"DAEMON__TENANTS_FILE": str(file)}

        shown = {"token_file": str(directory / "token")}
        with daemon(directory, **tenants("map")) as where:
            mapped = rates(where, runs, **shown)
        measured = {}
        with daemon(directory, **tenants("copy")) as where:
            measured["copy"] = rates(where, runs, **shown)
        with daemon(directory, "--insecure-loopback", listen="127.0.0.1:0") as where:
            measured["tcp"] = rates(where, runs)
        secure = certificate(directory)
        with daemon(directory, listen="127.0.0.1:0", **secure, **tenants("copy")) as where:
            measured["tls"] = rates(where, runs, ca_file=secure["DAEMON__TLS_CERT_FILE"], **shown)
    rows = [
        Row(f"{op}/{way}", of_way[i], "GB/s", floor=mapped[i])
        for way, of_way in measured.items()
        for i, op in enumerate(("store", "load"))
    ]
    publish("socket_transfer", rows, arguments.json)


if __name__ == "__main__":
    main()
