"""Runs the unit of `deploy/systemd` under a separate systemd and prints the observed state as JSON.

    unshare -pfm --mount-proc python -m tests.daemon.systemd_unit

The manager is a user's. It cannot set the user's name, nor three kinds of protection that need mounts which a container
refuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.daemon.daemon_process import bound_to, load, reached, store
from tests.daemon.in_process_daemon import PATIENT

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvcache.service"
LEFT_OUT = ("User", "Group", "ProtectHome", "ProtectKernelLogs", "ProtectKernelTunables")
RUN = Path("/run/user") / str(os.geteuid())
SOCKET = RUN / "kvcache" / "kvcache.socket"
SETTINGS = f"""
[daemon]
socket = "{SOCKET}"
[host]
capacity_bytes = "32MiB"
slab_bytes = "4MiB"
[nvme]
enabled = false
[log]
format = "text"
level = "info"
"""
PROMPT = list(range(32))


def until(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.02)
    raise TimeoutError("it never held")


def systemctl(*words: str) -> str:
    done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        log = Path("/run/log").read_text(encoding="utf-8")
        raise RuntimeError(f"systemctl {words}: {done.stderr}\n{log[-3000:]}")
    return done.stdout.strip()


def write_unit() -> None:
    """Write the unit and its settings for these paths and this interpreter."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    for path in ("/run/systemd/system", "/run/cache", "/run/etc", RUN / "systemd" / "user"):
        Path(path).mkdir(parents=True)
    RUN.chmod(0o700)
    Path("/run/etc/kvcache.toml").write_text(SETTINGS, encoding="utf-8")
    text = UNIT.read_text(encoding="utf-8")
    text = re.sub(rf"^({'|'.join(LEFT_OUT)})=.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("/usr/local/bin/kvcache", f"{sys.executable} -m kvcache.cli.main")
    text = text.replace("/etc/kvcache/kvcache.toml", "/run/etc/kvcache.toml")
    paths = f"{os.environ['PYTHONPATH']} {sys.prefix}"  # a checkout below /tmp is there as well
    text = text.replace("[Service]\n", f"[Service]\nBindReadOnlyPaths={paths}\n")
    text = text.replace("XDG_RUNTIME_DIR=/run/kvcache", f"XDG_RUNTIME_DIR={RUN} PYTHONPATH={os.environ['PYTHONPATH']}")
    (RUN / "systemd" / "user" / "kvcache.service").write_text(text, encoding="utf-8")


def main() -> dict[str, Any]:
    write_unit()
    os.environ |= {"XDG_RUNTIME_DIR": str(RUN), "XDG_CACHE_HOME": "/run/cache"}
    with open("/run/log", "wb") as log:
        words = ["/usr/lib/systemd/systemd", "--user", "--log-target=console", "--log-level=info"]
        manager = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until((RUN / "systemd" / "private").exists)
        return observe()
    finally:
        manager.terminate()
        manager.wait()


def pid() -> int:
    return int(systemctl("show", "-p", "MainPID", "--value", "kvcache"))


def observe() -> dict[str, Any]:
    import kvcache

    found: dict[str, Any] = {}
    systemctl("start", "kvcache")
    found["status"] = systemctl("show", "-p", "StatusText", "--value", "kvcache")
    first = pid()
    status = Path(f"/proc/{first}/status").read_text(encoding="utf-8")
    found["rights"] = re.findall(r"^CapEff:\s*(\w+)$|^NoNewPrivs:\s*(\d)$|^Seccomp:\s*(\d)$", status, re.MULTILINE)
    with kvcache.open(f"unix:{SOCKET}", **PATIENT) as cache:
        handle = bound_to(cache)
        expected = store(handle, PROMPT, 1)
        systemctl("restart", "kvcache")
        reached(cache)
        found["another"] = pid() != first
        with handle.request() as r:
            found["after a restart"] = dict(r.match(PROMPT).by_tier)
        found["the same bytes"] = load(handle, PROMPT) == expected
        found["kept twice"] = int(systemctl("show", "-p", "NFileDescriptorStore", "--value", "kvcache"))
        systemctl("reload", "kvcache")
        found["after a reload"] = load(handle, PROMPT) == expected
        killed = pid()
        os.kill(killed, signal.SIGKILL)
        until(lambda: pid() not in (0, killed))
        reached(cache, 120)
        with handle.request() as r:
            found["after a kill"] = dict(r.match(PROMPT).by_tier)
        found["check"] = cache.check()
    systemctl("stop", "kvcache")
    found["result"] = systemctl("show", "-p", "Result", "--value", "kvcache")
    found["left"] = SOCKET.exists()
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
