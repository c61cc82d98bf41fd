"""`kvcache token`: a new token for a tenant, and the line of the tenants file that lets it in."""

from __future__ import annotations

import typer

from kvcache.cli.output import Format, Json, Output, print_json


def token(output: Output = Format.table, as_json: Json = False) -> None:
    """Make a token: the first line is the client's to keep secret, the second one is for the daemon's tenants file."""
    from kvcache.daemon.server.auth import new_token, token_hash

    made = new_token()
    if as_json or output is Format.json:
        print_json({"token": made, "hash": token_hash(made)})
        return
    print(made)
    print(f'tokens = ["{token_hash(made)}"]')


def register(app: typer.Typer) -> None:
    app.command("token")(token)
