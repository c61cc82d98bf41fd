"""The half of a side that does the work: answers questions until its socket ends.

A question is a line of JSON, `[verb, arguments]`, an answer another one, `{"value": ...}` or `{"error": ...}`. They go
over a socket whose descriptor is the process's only argument, so that a library may print what it likes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback


def serve(worker: object) -> None:
    """Call the worker's methods by name. Ends the process at once: some libraries' threads never end by themselves."""
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rw") as questions:
        while question := questions.readline():
            verb, arguments = json.loads(question)
            try:
                answer = {"value": getattr(worker, verb)(**arguments)}
            except Exception as error:  # noqa: BLE001  whatever it is, the one who asked must hear of it
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            questions.write(json.dumps(answer) + "\n")
            questions.flush()
    os._exit(0)
