"""What is said through logging, and in which form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvcache.log import apply
from kvcache.settings import Log


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logger = logging.getLogger("kvcache")
    level = logger.level
    yield
    apply(Log())
    logger.setLevel(level)
    assert logger.handlers == []


def test_nothing_is_touched_unless_asked() -> None:
    apply(Log())
    assert logging.getLogger("kvcache").handlers == []
    assert logging.getLogger("kvcache").level == logging.NOTSET


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    apply(Log(format="json", level="info"))
    apply(Log(format="json", level="info"))
    logging.getLogger("kvcache.tier").info("%d blocks\nand a line", 3)
    logging.getLogger("kvcache.tier").debug("not said")
    try:
        raise ValueError("reason")
    except ValueError:
        logging.getLogger("kvcache").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["name"], first["message"]) == ("info", "kvcache.tier", "3 blocks\nand a line")
    assert "ValueError: reason" in second["trace"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    apply(Log(format="text"))
    logging.getLogger("kvcache").warning("here")
    assert capsys.readouterr().err.endswith("WARNING kvcache: here\n")
