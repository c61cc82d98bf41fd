"""A real vLLM in a process of its own: runs a list of rounds and writes what came out.

    python engine.py JOB RESULT

JOB is JSON: `model`, `llm` (arguments of LLM), `connector` (extra config, or null), `role`, `rounds`: each a list of
prompts (token ids) with `tokens` to generate, or a name of something to do between them. RESULT has the tokens of each
prompt, how many of it were cached, and the engine's counters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    job = json.loads(Path(job_path).read_text())
    for module in job.get("prepare", []):
        __import__(module)
    began = time.monotonic()
    transfer = None
    if job.get("connector") is not None:
        transfer = KVTransferConfig(
            kv_connector="KVCacheConnector",
            kv_connector_module_path=job.get("module", "kvcache.connector.vllm"),
            kv_role=job.get("role", "kv_both"),
            kv_connector_extra_config=job["connector"],
        )
    arguments = {
        "max_model_len": 2048,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        **job.get("llm", {}),
    }
    llm = LLM(model=job["model"], kv_transfer_config=transfer, **arguments)
    result = {"ready_s": time.monotonic() - began, "rounds": []}
    for item in job["rounds"]:
        if isinstance(item, str):
            result["rounds"].append(act(llm, item))
            continue
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=prompt.get("tokens", 8),
                ignore_eos=True,
                extra_args={"kv_transfer_params": prompt["params"]} if "params" in prompt else None,
            )
            for prompt in item
        ]
        began = time.monotonic()
        out = llm.generate([given(p) for p in item], sampling, use_tqdm=False)
        took = time.monotonic() - began
        result["rounds"].append(
            {
                "tokens": [list(o.outputs[0].token_ids) for o in out],
                "cached": [o.num_cached_tokens for o in out],
                "finish": [o.outputs[0].finish_reason for o in out],
                "took_s": took,
            }
        )
    result["metrics"] = metrics(llm)
    Path(result_path).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


def given(prompt: dict) -> dict:
    found = {"prompt_token_ids": prompt["ids"]}
    if "salt" in prompt:
        found["cache_salt"] = prompt["salt"]
    return found


def act(llm, what: str):
    if what == "flush":
        cache = connector(llm)._share.cache
        return {"flushed": cache.flush(30), "faults": cache.check()}
    if what == "reset":
        return {"reset": llm.reset_prefix_cache(reset_connector=True)}
    raise ValueError(what)


def connector(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def metrics(llm) -> dict:
    found = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            name = metric.name + "".join(
                f",{k}={v}" for k, v in sorted(metric.labels.items()) if k not in {"engine", "model_name"}
            )
            found[name] = metric.value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
