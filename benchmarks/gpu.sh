#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds, checks and measures the CUDA copies, in under six minutes once installed.
# benchmarks/gpu.sh [PYTHON] [--quick]. PYTHON has CuPy, pytest, hypothesis and rich; without it .venv is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=
if [[ ${1:-} && $1 != -* ]]; then
    python=$1 && shift
else
    source scripts/env
    python=.venv/bin/python
    "$python" -c 'import cupy' 2>/dev/null || "$python" -m pip install --quiet --editable '.[cuda13]'
fi
export PYTHONPATH=$PWD
mkdir -p benchmarks/results

"$python" -m pytest tests/gpu -q
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [[ $sanitizer ]]; then # tens of times slower: one test of each kind of kernel
    log=$(mktemp)
    "$sanitizer" --log-file "$log" "$python" -m pytest tests/gpu -q -k 'same_bytes or (quantised and bf16 and 20)' || true
    summary=$(grep 'ERROR SUMMARY' "$log" || echo 'could not run here')
    echo "compute-sanitizer: ${summary#=* }"
    [[ $summary != *SUMMARY* || $summary == *' 0 errors'* ]] || { cat "$log" && exit 1; }
else
    echo "compute-sanitizer: not here"
fi
theirs=.venv-lmcache/bin/python # by scripts/vs-lmcache with a CUDA build of torch in TORCH
if "$theirs" -c 'import torch, lmcache.cuda_ops' 2>/dev/null; then
    set -- "$@" --lmcache "$theirs"
else
    echo "LMCache's CUDA copies: its kernels do not load here"
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr -c 'A-Za-z0-9\n' '-')
"$python" benchmarks/gpu_copy.py "$@" --json "benchmarks/results/gpu-$name.json"
