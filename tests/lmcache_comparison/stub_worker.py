"""A side without a library: the tests' peer."""

from __future__ import annotations

import os
import threading

from lmcache_comparison.worker_loop import serve


class Stub:
    def name(self) -> str:
        print("libraries print what they like")
        return "stub"

    def double(self, number: float) -> float:
        return 2 * number

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def fail(self) -> None:
        raise ValueError("no such thing")

    def leave(self) -> None:
        os._exit(3)

    def dawdle(self) -> None:
        threading.Event().wait()


if __name__ == "__main__":
    serve(Stub())
