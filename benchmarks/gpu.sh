#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, which needs no network: checks and measures the CUDA copies, in under six minutes.
# What fails keeps nothing else from being run, and is named at the end.
# benchmarks/gpu.sh [PYTHON] [--quick]. PYTHON has CuPy, hypothesis, numpy, pytest, pytest-timeout, rich and xxhash;
# without it .venv is used, and made. OUT: where the figures go, benchmarks/results if not given.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

python=
if [[ ${1:-} && $1 != -* ]]; then
    python=$1 && shift
else
    source scripts/env
    set +e # as here: what fails is named at the end
    python=.venv/bin/python
    "$python" -c 'import cupy' 2>/dev/null || "$python" -m pip install --quiet --editable '.[cuda13]' || exit
fi
export PYTHONPATH=$PWD
"$python" - cupy hypothesis numpy pytest pytest_timeout rich xxhash <<'END' || exit
import importlib.util, sys
if missing := [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]:
    sys.exit(f"{sys.executable} has no {', '.join(missing)}")
from kvcache.errors import ConfigError
from kvcache.transfer.cuda.device import Batch
from kvcache.transfer.cuda.device import CupyDevice
try:
    device = CupyDevice(0)
except ConfigError as error:
    sys.exit(str(error))
batched = "there" if Batch.of_driver().available else "not there"
print(f"{device.name}: {device.multiprocessors} multiprocessors, cuMemcpyBatchAsync {batched}")
END
failed=()
part() { # NAME SECONDS COMMAND...
    local name=$1 most_s=$2 && shift 2
    echo "$name ..."
    timeout --kill-after 10 "$most_s" "$@" || failed+=("$name")
}

tests=("$python" -m pytest tests/gpu -q -W default) # what CuPy warns of is no fault of these
part tests 150 "${tests[@]}"

theirs=.venv-lmcache/bin/python # by scripts/vs-lmcache with a CUDA build of torch in TORCH
if "$theirs" -c 'import torch, lmcache.cuda_ops' 2>/dev/null; then
    set -- "$@" --lmcache "$theirs"
else
    echo "LMCache's CUDA copies: its kernels do not load here"
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr -c 'A-Za-z0-9\n' '-')
out=${OUT:-benchmarks/results} && mkdir -p "$out"
part figures 150 "$python" benchmarks/gpu_copy.py "$@" --json "$out/gpu-${name:-unnamed}.json"

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [[ $sanitizer ]]; then # tens of times slower: one test of each kind of kernel
    log=$(mktemp)
    part compute-sanitizer 100 "$sanitizer" --log-file "$log" --report-api-errors no \
        "${tests[@]}" -k 'same_bytes or (quantised and bf16 and 20)'
    grep 'ERROR SUMMARY' "$log" || echo "compute-sanitizer: no summary, so it could not run here, or not in time"
    if grep 'ERROR SUMMARY' "$log" | grep -qv ' 0 errors'; then
        head -100 "$log"
        failed+=("compute-sanitizer's findings")
    fi
    rm -f "$log"
else
    echo "compute-sanitizer: not here"
fi
((${#failed[@]} == 0)) || { printf 'failed: %s\n' "${failed[@]}" && exit 1; }
