"""What stands under "kvcache" in the extra configuration, and which model and weights a server has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.connector.sglang.config import Options, close_cache, engine_name, identify_model, open_cache
from kvcache.connector.sglang.host_pools import Ranks
from kvcache.errors import ConfigError, ModelError
from tests.engine import tiny_model


def test_options_and_settings_are_separated() -> None:
    options = Options.read({"kvcache": {"revision": "r", "deadline_s": 1, "host": {"capacity_bytes": "1GiB"}}, "x": 1})
    assert (options.revision, options.deadline_s, options.settings) == ("r", 1, {"host": {"capacity_bytes": "1GiB"}})
    assert Options.read(None) == Options.read({"kvcache": {}}) == Options()


@pytest.mark.parametrize(
    "given",
    [
        [],
        {"deadline_s": 0},
        {"deadline_s": 9},
        {"deadline_s": "1"},
        {"deadline_s": True},
        {"share_across_engines": 1},
        {"tenant": 3},
    ],
)
def test_invalid_options_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="kvcache"):
        Options.read({"kvcache": given or "text"})


def test_an_unknown_setting_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="hots"):
        open_cache(Options.read({"kvcache": {"hots": {"capacity_bytes": 1}}}))


def test_a_directory_that_is_closing_can_be_opened_again(tmp_path: Path) -> None:
    given = {
        "nvme": {"path": str(tmp_path), "capacity_bytes": 64 << 20, "min_free_bytes": 0},
        "control": {"enabled": False},
    }
    options = Options.read({"kvcache": given | {"host": {"capacity_bytes": 8 << 20}}})
    for _ in range(3):
        close_cache(open_cache(options))


def test_the_revision_comes_from_the_server_or_the_options(tmp_path: Path) -> None:
    places = [tiny_model.make(tmp_path / str(seed), seed=seed) for seed in range(2)]
    told = [identify_model(SimpleNamespace(model_path=place), "served", Options()) for place in places]
    assert told[0].revision != told[1].revision, "the same served name, other weights"
    assert told[0].facts["config"]["rope_parameters"]
    assert identify_model(SimpleNamespace(model_path=places[0]), "other name", Options()) == told[0]
    for field in ("kv_cache_dtype", "quantization"):
        other = identify_model(SimpleNamespace(model_path=places[0], **{field: "fp8_e5m2"}), "served", Options())
        assert other.facts != told[0].facts
    with pytest.raises(ModelError, match="revision"):
        identify_model(None, "nowhere/nothing", Options())
    by_hand = identify_model(None, "nowhere/nothing", Options(revision="of today"))
    assert (by_hand.model, by_hand.revision) == ("nowhere/nothing", "of today")


def test_each_pool_has_its_own_facts() -> None:
    identity = identify_model(None, "m", Options(revision="r"))
    assert identity.facts_of("kv", "") != identity.facts_of("swa", "") != identity.facts_of("swa", "v2")


def test_a_server_of_several_processes_has_an_engine_name() -> None:
    served = SimpleNamespace(host="127.0.0.1", port=30000, dp_size=1)
    options = Options(settings={"host": {"capacity_bytes": 1}})
    assert engine_name(served, Ranks(), options) is None
    names = [engine_name(served, Ranks(rank, 2), options) for rank in range(2)]
    assert names[0] == names[1] != engine_name(served, Ranks(0, 2), Options())
    served.port = 30001
    assert names[0] != engine_name(served, Ranks(0, 2), options)
    served.dp_size = 2
    assert engine_name(served, Ranks(), options)
