"""One vLLM in this process: reads a job as JSON from standard input, writes what it measured as its last line.

A job has `model`, `llm` (arguments of LLM), `connector` (class name, module path or null, extra config) or null, and
`steps`: `["first", prompt]` gives the seconds to the first token and how many tokens were cached, `["flush"]` waits for
the tiers below, `["load", prompts, tokens]` runs many at once and gives tokens a second and times between tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if job["connector"]:
        name, module, extra = job["connector"]
        transfer = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    began = time.perf_counter()
    llm = LLM(
        model=job["model"],
        kv_transfer_config=transfer,
        **{"enforce_eager": not torch.cuda.is_available(), "distributed_executor_backend": "uni", **job["llm"]},
    )
    measured: list[Any] = [time.perf_counter() - began]
    for what, *given in job["steps"]:
        if what == "first":
            sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            began = time.perf_counter()
            (out,) = llm.generate([{"prompt_token_ids": given[0]}], sampling, use_tqdm=False)
            measured.append([time.perf_counter() - began, out.num_cached_tokens, list(out.outputs[0].token_ids)])
        elif what == "flush":
            connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
            report = connector._share.cache.flush(120)  # noqa: SLF001  no hook of vLLM flushes
            if not report:
                raise SystemExit(f"nothing can be measured: not every block reached its tier: {report}")
            measured.append(True)
        else:
            measured.append(saturate(llm, *given))
    print(json.dumps(measured))
    llm.llm_engine.engine_core.shutdown()


def saturate(llm: Any, prompts: list[list[int]], tokens: int) -> list[float]:
    """All at once: tokens a second, prompts included, and the 99th percentile of the time between tokens."""
    from vllm import SamplingParams

    engine, last, gaps = llm.llm_engine, {}, []
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{began}-{i}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for out in outputs:
            if out.request_id in last:
                gaps.append(now - last[out.request_id])
            last[out.request_id] = now
    took = time.perf_counter() - began
    return [(sum(map(len, prompts)) + tokens * len(prompts)) / took, sorted(gaps)[int(0.99 * (len(gaps) - 1))]]


if __name__ == "__main__":
    main()
