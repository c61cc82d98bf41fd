"""A real vLLM in a process of its own: runs a list of rounds and writes what came out.

    python engine.py JOB RESULT

JOB is JSON: `model`, `llm` (arguments of LLM), `connector` (extra config, or null), `role`, `rounds`: each a list of
prompts (token ids) with `tokens` to generate, or a name of something to do between them. RESULT has the tokens of each
prompt, how many of it were cached, and the engine's counters.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
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
    elif job.get("transfer") is not None:
        transfer = KVTransferConfig(**job["transfer"])
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
    if job.get("events"):
        from vllm.config.kv_events import KVEventsConfig

        arguments["kv_events_config"] = KVEventsConfig(**job["events"])
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
        adapters = {"lora_request": [lora(p) for p in item]} if any("lora" in p for p in item) else {}
        out = llm.generate([given(p) for p in item], sampling, use_tqdm=False, **adapters)
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


def lora(prompt: dict):
    from vllm.lora.request import LoRARequest

    return LoRARequest(*prompt["lora"])


def replace(llm, there: str, here: str):
    """Other weights under the name of an adapter."""
    for file in Path(there).iterdir():
        (Path(here) / file.name).write_bytes(file.read_bytes())
    return {}


def act(llm, what: str):
    name, _, rest = what.partition(" ")
    return ACTS[name](llm, *rest.split())


def flush(llm):
    cache = connector(llm)._share.cache
    return {"flushed": cache.flush(30), "faults": cache.check()}


def origin(llm):
    return {"origin": connector(llm)._scheduler._origin}


def reset(llm):
    return {"reset": llm.reset_prefix_cache(reset_connector=True)}


def pause(llm):
    """As a trainer does before it gives an engine new weights."""
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler()
    core.resume_scheduler()
    return {}


def records(llm):
    return {tier: told["records"] for tier, told in connector(llm)._share.cache.stats()["tiers"].items()}


def paces(llm):
    """What the plan expects of a step of 1,000 tokens, by what it was told."""
    (pace,) = connector(llm)._share.cache.plan._engines.values()
    return {"seconds": pace.seconds(1000) if pace.known else 0.0}


def counters(llm):
    return connector(llm)._share.cache.stats()["counters"]


def arrived(llm):
    """Until nothing is being promoted any more, wanted or not."""
    return {"arrived": connector(llm)._share.cache.tier_manager.promoter.wait_idle(60)}


def sampled(llm, name: str):
    """Until the connector has seen a row of ours grow; vLLM is told with the next step."""
    sampler, end = connector(llm)._sampler, time.monotonic() + 60
    while not any(sampler._now.get(name, {}).values()) and time.monotonic() < end:
        time.sleep(0.05)
    return {"sampled": sampler._now.get(name, {})}


def kill(llm, pid: str):
    os.kill(int(pid), signal.SIGKILL)
    return {"killed": int(pid)}


def aborts(llm, seed: str):
    """Requests of which half are aborted at random moments; what the others said."""
    from vllm import SamplingParams

    rng, engine = random.Random(int(seed)), llm.llm_engine
    base = [rng.randrange(10, 900) for _ in range(300)]
    out, doomed = {}, {}
    for i in range(24):
        ids = base[: rng.randrange(50, 300)] + [rng.randrange(10, 900) for _ in range(rng.randrange(1, 60))]
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": ids}, sampling)
        out[f"{seed}-{i}"] = None
        if rng.random() < 0.5:
            doomed[f"{seed}-{i}"] = rng.randrange(30)
    step = 0
    while engine.has_unfinished_requests():
        for request_id in [r for r, at in doomed.items() if at == step]:
            engine.abort_request([request_id])
            out.pop(request_id)
        for done in engine.step():
            if done.finished and done.request_id in out:
                out[done.request_id] = list(done.outputs[0].token_ids)
        step += 1
    return {"tokens": {r: t for r, t in out.items() if r not in doomed}, "aborted": len(doomed)}


def leaks(llm):
    """What is still held when no request is left."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(50):  # loads of aborted requests end, and their end is told
        core.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    worker = core.model_executor.driver_worker.worker.model_runner
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    working = get_kv_transfer_group()._worker
    scheduling = connector(llm)._scheduler
    assert worker is not None
    return {
        "requests": len(core.scheduler.requests),
        "pages": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "tracked": len(scheduling.requests),
        "pending": len(scheduling._pending),
        "loading": len(working._loading) + len(working._waiting),
        "known": len(working._known),
        "declined": len(scheduling.uncached._requests),
    }


def idle(llm):
    """Empty steps until the connector has nothing under way."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(2000):
        core.step()
        if not core.scheduler.connector.has_pending_push_work():
            break
        time.sleep(0.005)
    return {}


def events(llm, replay: str):
    """All that was published, as a late subscriber reads it; the engine makes steps until there is no more to come."""
    import msgspec
    import zmq

    core = llm.llm_engine.engine_core.engine_core
    connector(llm)._scheduler.events.poll()
    while core.scheduler.connector.has_pending_push_work():
        core.step()
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(replay)
    found = []
    try:
        last = -1
        while True:  # published on a thread of its own: until nothing new has come
            socket.send_multipart([b"", (last + 1).to_bytes(8, "big")])
            before = last
            while True:
                *_, number, payload = socket.recv_multipart()
                if not payload:
                    break
                last = int.from_bytes(number, "big")
                found += msgspec.msgpack.decode(payload)[1]
            if last == before and found:
                return found
    finally:
        socket.close(0)


ACTS = {
    act.__name__: act
    for act in (
        flush,
        kill,
        counters,
        reset,
        aborts,
        leaks,
        events,
        idle,
        origin,
        pause,
        replace,
        records,
        paces,
        sampled,
        arrived,
    )
}


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
    from prometheus_client import REGISTRY

    for family in REGISTRY.collect():  # ours, which LLM.get_metrics leaves out
        for sample in family.samples if family.name.startswith("kvcache_") else ():
            labels = (v for k, v in sample.labels.items() if k not in {"engine", "model_name"})
            found[",".join((sample.name, *labels))] = sample.value
    return found


PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.model_executor.models.transformers",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


def fork_server() -> None:
    """Imports what takes long once, then runs each job that is told on stdin in a fork: one line of JSON a job, with
    `job`, `result`, `log`, `env` and `path`; answered by the process id, and when it has ended by its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM says as it is imported is no answer
    from vllm import LLM  # noqa: F401

    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(module)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if not pid:
            child(told)
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def child(told) -> None:
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(told["env"])
    sys.path[:0] = told["path"]
    try:
        main(told["job"], told["result"])
    except BaseException:  # noqa: BLE001  a fork never returns to the fork_server
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["fork-server"]:
        fork_server()
    else:
        main(*sys.argv[1:])
