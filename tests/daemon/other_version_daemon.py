"""A daemon that hands over as another version would.

python -m tests.daemon.other_version_daemon BEHAVIOUR python -m ... daemon
"""

from __future__ import annotations

import sys

from kvcache.cache import warm_restart
from kvcache.daemon.server import handover
from kvcache.daemon.server.server import Daemon
from kvcache.errors import ConfigError


def refuse(daemon: Daemon, peer: object) -> dict[str, object]:
    raise ConfigError("role 'heir': expected control or mover")


def hang(successor: object, cache: object) -> None:
    """Send nothing, and keep the connection open until the process ends."""


BEHAVIOURS = {
    "table": lambda: setattr(warm_restart, "VERSION", 99),
    "refuses": lambda: setattr(Daemon, "_exit_for_successor", refuse),
    "silent": lambda: setattr(sys.modules["kvcache.daemon.server.handover"], "hand_over", hang),
}


if __name__ == "__main__":
    BEHAVIOURS[sys.argv[1]]()
    assert handover
    sys.argv = ["kvcache", *sys.argv[5:]]
    from kvcache.cli.main import main

    main()
