"""`kvcache check`: an audit of a running cache."""

from __future__ import annotations

import sys

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one


def check(address: Address = None, output: Output = Format.table, as_json: Json = False) -> None:
    """Audit all that a running cache holds, every record on its drive included; exit 1 if there is a fault.

    It goes on serving meanwhile, but waits while its index is walked: about half a second for a million blocks, and
    some seconds more if they are in flux. A large drive takes minutes.
    """
    from kvcache.daemon.client.control import ask

    found = ask(the_one(address), "check", timeout_s=None)
    faults = found["faults"]
    if found["busy"]:
        print("kvcache: an audit is under way already; ask again when it has ended", file=sys.stderr)
        raise typer.Exit(1)
    if as_json or output is Format.json:
        print_json(found)
    elif faults:
        print_table(("fault",), [(fault,) for fault in faults])
        if found["count"] > len(faults):
            print(f"and {found['count'] - len(faults):,} more")
    else:
        print("sound")
    if found["count"]:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("check")(check)
