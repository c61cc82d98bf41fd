"""What is said through logging, and in which form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvcache.log import RequestContext, configure_logging, logger, request_context
from kvcache.settings.service import LogSettings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logger = logging.getLogger("kvcache")
    level = logger.level
    yield
    configure_logging(LogSettings())
    logger.setLevel(level)
    assert logger.handlers == []


def test_logging_is_configured_only_on_request() -> None:
    configure_logging(LogSettings())
    assert logging.getLogger("kvcache").handlers == []
    assert logging.getLogger("kvcache").level == logging.NOTSET


def test_json_logs_have_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogSettings(format="json", level="info"))
    configure_logging(LogSettings(format="json", level="info"))
    logging.getLogger("kvcache.tier").info("%d blocks\nand a line", 3)
    logging.getLogger("kvcache.tier").debug("not said")
    try:
        raise ValueError("reason")
    except ValueError:
        logging.getLogger("kvcache").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["name"], first["message"]) == ("info", "kvcache.tier", "3 blocks\nand a line")
    assert "ValueError: reason" in second["trace"]


def test_text_logs_have_one_line_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogSettings(format="text"))
    logging.getLogger("kvcache").warning("here")
    assert capsys.readouterr().err.endswith("WARNING kvcache: here\n")


def test_each_line_names_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    log = logger("kvcache.store")
    for form in ("text", "json"):
        configure_logging(LogSettings(format=form))
        with request_context(RequestContext("r-7")):
            log.warning("late")
        log.warning("on its own")
    text, alone, *lines = capsys.readouterr().err.splitlines()
    assert text.endswith("WARNING kvcache.store request=r-7: late")
    assert alone.endswith("WARNING kvcache.store: on its own")
    assert [json.loads(line).get("request") for line in lines] == ["r-7", None]
