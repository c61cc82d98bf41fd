"""Both sides of the connector without vLLM, of which they need no more than stands here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcache.connector.vllm as package
from kvcache.block.layout import Group, KVLayout
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.kv_layout import ModelIdentity
from kvcache.transfer.pages import GroupPages

TOKENS, PAGES = 4, 64
LAYOUT = KVLayout((Group(layers=1, kv_heads=1, head_dim=8, dtype="fp16"),), TOKENS)
MODEL = ModelIdentity("m", "r", {}, LAYOUT, {(0, 0): LAYOUT.whole}, (0,))
VERSION = "kvcache.connector.vllm.version"
OF_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = tuple(f"kvcache.connector.vllm.{name}" for name in ("message", "whole", "scheduler", "worker"))


@pytest.fixture
def any_vllm_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any version of vLLM."""
    version: Any = ModuleType(VERSION)
    version.VERSION, version.hash_origin, version.hash_tokens = "0", lambda _: "vllm", lambda *_: TOKENS
    version.block_table = lambda *_: None
    monkeypatch.setitem(sys.modules, VERSION, version)
    monkeypatch.setattr(package, "version", version, raising=False)


@pytest.fixture
def make_connector(monkeypatch: pytest.MonkeyPatch, any_vllm_version: None) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """The scheduler's side and a rank's over one cache; the rank's pages are `working.memory`."""
    base: Any = ModuleType(OF_VLLM)
    base.KVConnectorMetadata = base.KVConnectorWorkerMetadata = base.KVConnectorHandshakeMetadata = object
    monkeypatch.setitem(sys.modules, OF_VLLM, base)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    made: list[Any] = []

    def make(cache: Any, load: str = "sync") -> tuple[Any, Any]:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=True),
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        )
        options = Options(load=load)  # type: ignore[arg-type]  # one of its three words
        groups = SimpleNamespace(kv_cache_groups=[None])
        scheduling = importlib.import_module(OURS[2]).ConnectorScheduler(config, groups, options, cache)
        working = importlib.import_module(OURS[3]).ConnectorWorker(options, cache, (0, 0), groups=1, blocks=PAGES)
        scheduling._model = MODEL
        working.memory = np.zeros((PAGES, 2, TOKENS, 1, 8), np.float16)
        pages = GroupPages.from_tensors(LAYOUT, [working.memory], axes=("page", "kv", "token", "head", "dim"))
        working._set_model = lambda model: vars(working).update(_model=model or working._model, _pages=[pages])
        made.extend((scheduling, working))
        return scheduling, working

    yield make
    for side in made:
        side.close()
    for name in OURS:
        sys.modules.pop(name, None)
        vars(package).pop(name.rpartition(".")[2], None)


def request(name: str, digests: list[bytes] | None = None, **params: Any) -> Any:
    """As vLLM's; `params` are ours."""
    hashes = [bytes([i]) * 32 for i in range(3)] if digests is None else digests
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params={f"kvcache.{wish}": value for wish, value in params.items()},
        prompt_token_ids=list(range(TOKENS * len(hashes))),
        num_tokens=TOKENS * len(hashes),
        num_prompt_tokens=TOKENS * len(hashes),
        block_hashes=hashes,
        cache_salt=None,
        lora_request=None,
    )


def blocks(ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def output(asked: Any = None, ids: Sequence[int] = (), computed: int = 0, *, ended: str = "") -> Any:
    """A step that computes what is left of one request, or nothing."""
    new = (
        []
        if asked is None
        else [SimpleNamespace(req_id=asked.request_id, block_ids=(ids,), num_computed_tokens=computed)]
    )
    scheduled = {} if asked is None else {asked.request_id: asked.num_tokens - computed}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids={ended} - {""},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set()),
        num_scheduled_tokens=scheduled,
    )


def store_three(scheduling: Any, working: Any, asked: Any) -> None:
    """A request computes three blocks that are not cached, and both sides store them."""
    assert scheduling.match_tokens(asked, 0) == (0, False)
    scheduling.on_allocated(asked, blocks([1, 2, 3]), 0)
    message = scheduling.build_metadata(output(asked, [1, 2, 3]))
    working.begin(message)
    working.store(message)
    working.close()
