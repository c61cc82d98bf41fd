"""Tokens and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.daemon.token import OPERATOR, Tokens, hashed, made
from kvcache.errors import ConfigError

NAMES = st.text(st.characters(whitelist_categories=("L", "N"), whitelist_characters="-_./"), min_size=1, max_size=20)


@given(st.dictionaries(st.text(min_size=1, max_size=60), NAMES, max_size=8), st.text(max_size=60))
def test_a_token_is_its_tenants_and_nobody_elses(owners: dict[str, str], other: str) -> None:
    tokens = Tokens([(tenant, hashed(token)) for token, tenant in owners.items()])
    assert {token: tokens.tenant(token) for token in owners} == owners
    assert tokens.tenant(other) == owners.get(other)
    assert tokens.tenants == set(owners.values())


def test_a_file_of_them(tmp_path: Path) -> None:
    old, new, operator = made(), made(), made()
    assert len({old, new, operator}) == 3
    file = tmp_path / "tokens"
    file.write_text(
        f"# who\n\nteam-a {hashed(old)}\nteam-a\t{hashed(new).upper()}  # since May\n{OPERATOR} {hashed(operator)}\n",
        encoding="utf-8",
    )
    tokens = Tokens.read(file)
    assert [tokens.tenant(each) for each in (old, new, operator, "")] == ["team-a", "team-a", OPERATOR, None]
    assert len(tokens) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no tenant"),
        ("# nobody\n", "names no tenant"),
        ("team-a secret-in-clear\n", "line 1"),
        (f"team-a {hashed('x')} more\n", "line 1"),
        (f"ok {hashed('x')}\nteam-b\n", "line 2"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_not_repeated(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as refused:
        Tokens.read(file)
    assert "secret" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Tokens.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Tokens.read(tmp_path / "binary")
