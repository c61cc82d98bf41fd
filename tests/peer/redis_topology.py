"""Several real servers that belong together: a Redis Cluster, and a master with replicas under sentinels."""

from __future__ import annotations

import atexit
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import redis
from redis.crc import key_slot

from tests.peer.ports import free_port
from tests.peer.redis_server import RedisServer

SLOTS = 16_384


def until(true: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Look again and again; an error of the server counts as no."""
    for _ in range(int(seconds / 0.02)):
        try:
            if true():
                return
        except redis.RedisError:
            pass
        Event().wait(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Node(RedisServer):
    """Of a cluster. Its port leaves room for that of the bus. `silent_ms`: after so long without a word the others take
    it for lost: long, as a rule, since a busy machine keeps every process waiting."""

    def __init__(self, *, silent_ms: int = 15_000, binary: str | None = None) -> None:
        bus = free_port()
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(silent_ms), "--cluster-port", str(bus)]
        options += ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"]
        super().__init__(*options, binary=binary)
        self.bus = bus
        self.id = self.client.execute_command("CLUSTER MYID").decode()


class Cluster:
    """`masters` nodes with the slots divided among them, and a replica for each where `replicas`."""

    def __init__(self, masters: int = 3, *, replicas: bool = False, binary: str | None = None) -> None:
        self.nodes: list[Node] = []
        try:
            while len(self.nodes) < masters * (2 if replicas else 1):
                self.nodes.append(Node(silent_ms=2_000 if replicas else 15_000, binary=binary))
            self._join(masters)
        except BaseException:
            self.end()
            raise
        self.url = "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes) + "/0"

    def _join(self, masters: int) -> None:
        self.masters = self.nodes[:masters]
        for i, node in enumerate(self.masters):
            first, end = i * SLOTS // masters, (i + 1) * SLOTS // masters
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        for node in self.nodes[1:]:
            node.client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus)
        until(lambda: all(self._sees_all(node) for node in self.nodes), "the nodes know each other")
        for master, replica in zip(self.masters, self.nodes[masters:], strict=False):
            until(lambda m=master, r=replica: r.client.execute_command("CLUSTER REPLICATE", m.id), "a replica")
        until(lambda: all(self._is_healthy(node) for node in self.nodes), "the cluster is healthy")

    def _sees_all(self, node: Node) -> bool:
        lines = node.client.execute_command("CLUSTER NODES")
        known = lines if isinstance(lines, dict) else lines.decode().splitlines()
        return len(known) == len(self.nodes)

    def _is_healthy(self, node: Node) -> bool:
        said = node.client.execute_command("CLUSTER INFO")
        state = said["cluster_state"] if isinstance(said, dict) else said.decode()
        replicas = [other for other in self.nodes if other not in self.masters]
        linked = all(other.client.info("replication").get("master_link_status") == "up" for other in replicas)
        return "ok" in str(state).splitlines()[0] and linked

    def move(self, slot: int, source: Node, target: Node, *, leave_open: bool = False) -> None:
        """Move one slot with its keys, as re-sharding does; `leave_open`: before the nodes agree that it has moved."""
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        while keys := source.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            # on a busy machine the nodes may take each other for lost, for a moment
            command = ["MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys]
            until(lambda command=command: source.client.execute_command(*command), "the keys have moved")
        if not leave_open:
            for node in (target, source, *self.nodes):
                node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)

    def owner(self, name: bytes) -> Node:
        return self.masters[next(i for i in range(3) if key_slot(name) < (i + 1) * SLOTS // 3)]

    def end(self) -> None:
        for node in self.nodes:
            node.end()


_shared: list[Cluster] = []
_last: list[Path] = []


def empty_cluster(path: Path) -> Cluster:
    """One for the whole run, for tests that do it no harm; emptied where the last caller was for another path."""
    if not _shared:
        _shared.append(Cluster())
        atexit.register(_shared[0].end)
    if _last != [path]:
        _last[:] = [path]
        for node in _shared[0].nodes:
            node.client.flushall()
    return _shared[0]


class Sentinels:
    """A master, a replica, and three sentinels that agree within half a second that a master is gone."""

    NAME = "fleet"

    def __init__(self, binary: str | None = None, *, password: str = "", master_password: str = "") -> None:
        """`password`: of the sentinels; `master_password`: of the two servers."""
        link = ["--masterauth", master_password] if master_password else []
        self.servers = [RedisServer(*link, binary=binary, password=master_password) for _ in range(2)]
        self.master, self.replica = self.servers
        self.replica.client.execute_command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        self.master.client.execute_command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        self.replica.client.replicaof("127.0.0.1", str(self.master.port))
        until(lambda: self.replica.client.info("replication")["master_link_status"] == "up", "the replica is linked")
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-sentinel-")
        self._processes = []
        self.ports = [free_port() for _ in range(3)]
        for port in self.ports:
            file = Path(self._directory.name, f"{port}.conf")
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {self._directory.name}\n"
                f"sentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 2\n"
                + (f'requirepass "{password}"\nsentinel sentinel-pass "{password}"\n' if password else "")
                + (f'sentinel auth-pass {self.NAME} "{master_password}"\n' if master_password else "")
                + f"sentinel down-after-milliseconds {self.NAME} 500\nsentinel failover-timeout {self.NAME} 2000\n"
            )
            command = [str(self.master.binary), str(file), "--sentinel"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        self.clients: list[Any] = [
            redis.Redis(port=port, password=password or None, protocol=2, socket_timeout=2) for port in self.ports
        ]
        until(lambda: all(self._knows(client) for client in self.clients), "the sentinels know each other")
        self.url = "redis://" + ",".join(f"127.0.0.1:{port}" for port in self.ports) + "/0"

    def _knows(self, client: Any) -> bool:
        said = client.sentinel_master(self.NAME)
        return said["num-other-sentinels"] == 2 and said["num-slaves"] == 1

    def says(self) -> int:
        """The port of the master, as each sentinel has it; 0 while they differ."""
        ports = {client.sentinel_get_master_addr_by_name(self.NAME)[1] for client in self.clients}
        return int(ports.pop()) if len(ports) == 1 else 0

    def end(self) -> None:
        for client in self.clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait()
        for server in self.servers:
            server.end()
        self._directory.cleanup()
