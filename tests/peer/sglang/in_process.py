"""SGLang in this process, as one rank of some, with host pools that copy by torch."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path


def init_in_process(rank: int, size: int, meeting: Path) -> None:
    """`meeting`: a file by which the ranks find each other."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # The ninja that servers take as well: another version of it builds SGLang's extension anew, and then they do again.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.path.insert(0, str(Path(__file__).parent / "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from sglang.srt.runtime_context import get_parallel
        from sglang_cpu import hicache

        hicache.install()
        ranks = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "dp", "moe_ep", "attn_dcp")
        get_parallel().override_permanently(launch_world_rank=rank, **{f"{name}_rank": 0 for name in ranks})
        get_parallel().override_permanently(attn_dcp_size=1)
        from sglang.srt.mem_cache.utils import get_hash_str

        get_hash_str([1] * 16, None, 16)  # compiles, the first time on a machine
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
