"""The half of a side that asks: a library at work in a process and an environment of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parents[1]
STARTING_S, CLOSING_S = 300.0, 10.0


class WorkerLostError(Exception):
    """The process ended or did not answer in time: `what` says which."""

    def __init__(self, what: str, last_words: str) -> None:
        super().__init__(f"{what}; its last words: {last_words}")
        self.what = what


class WorkerProcess:
    """`command` starts a program that calls `serve`; what it prints goes to `log`. Starting does not wait for it, and
    the first answer may take as long as a start does."""

    def __init__(self, command: Sequence[str], log: Path, *, threads: int, timeout_s: float = 180.0) -> None:
        self._log, self._lost = log, False
        mine, its = socket.socketpair()
        with its, log.open("ab") as out:
            self._process = subprocess.Popen(
                [*command, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environ(threads),
                pass_fds=[its.fileno()],
            )
        mine.settimeout(max(timeout_s, STARTING_S))
        self._timeout_s = timeout_s
        self._line, self._answers = mine, mine.makefile("rw")

    def ask(self, verb: str, **arguments: Any) -> Any:
        """The answer. RuntimeError where the library raised; WorkerLostError where it is gone."""
        what = "the process ended"
        try:
            self._answers.write(json.dumps([verb, arguments]) + "\n")
            self._answers.flush()
            line = self._answers.readline()
        except TimeoutError:
            what, line = f"no answer in {self._line.gettimeout():g} s", ""
        except OSError:  # a broken pipe
            line = ""
        if not line:
            self._lost = True
            raise WorkerLostError(what, self._last_words())
        self._line.settimeout(self._timeout_s)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{verb}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """Ends the process: by itself, or, where it does not answer any more, at once."""
        self._line.close()
        with suppress(OSError):  # what could not be sent
            self._answers.close()
        try:
            self._process.wait(0 if self._lost else CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environ(threads: int) -> dict[str, str]:
    """The same for both: as many threads, nothing sent anywhere, none of the user's settings. OpenMP's threads wait
    asleep: where others are at work too, spinning makes LMCache's copies ten times slower."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHE_", "LMCACHE_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
    }
