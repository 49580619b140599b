#!/bin/sh
# All that needs two GPUs, in at most five minutes: results against one store under NCCL, then times as a table.
# Python 3.12 with torch, numpy, ml_dtypes, taichi, safetensors and cuda-bindings.
set -e
cd "$(dirname "$0")/../.."
export ENABLE_TAICHI_HEADER_PRINT=0 TI_SKIP_VERSION_CHECK=ON PYTHONPATH="$PWD:$PWD/benches${PYTHONPATH:+:$PYTHONPATH}"
python -m torch.distributed.run --standalone --nproc-per-node "${GPUS:-2}" benches/distributed/ranks.py "$@"
