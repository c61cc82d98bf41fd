"""SGLang 0.5.23's attention on a processor writes a window's keys where its own pool has them, and reads them where the
full pool has them: what a token sees then depends on who used these places before. Here it reads where it wrote."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any


def reading_where_it_wrote(run: Callable[..., Any]) -> Callable[..., Any]:
    told = signature(run)

    def translated(self: Any, *given: Any, **named: Any) -> Any:
        call = told.bind(self, *given, **named)
        if self.use_sliding_window_kv_pool and call.arguments.get("sliding_window_size") is not None:
            where = self.token_to_kv_pool.translate_loc_from_full_to_swa(call.arguments["req_to_token"].long())
            call.arguments["req_to_token"] = where
        return run(*call.args, **call.kwargs)

    return translated


def install() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, reading_where_it_wrote(getattr(TorchNativeAttnBackend, name)))
