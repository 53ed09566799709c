#!/usr/bin/env bash
# benchmarks/bench_distributed.py as a release needs it, in at most 15 minutes, 20 with four GPUs: each part has a limit.
#   bash benchmarks/bench_distributed.sh [GPUs] [folder for the results]
set -u
gpus=${1:-2}
out=${2:-${OUT:-out}}
mkdir -p "$out"
export PYTHONPATH=.
run() {
    timeout "$1" python -m torch.distributed.run --nproc-per-node "$gpus" benchmarks/bench_distributed.py \
        --parallel "$2" --rows "$3" --json "$out/distributed.$2.$gpus.json" 2>"$out/distributed.$2.err" ||
        { echo "$2: cut off or failed, rc $?"; grep -v Warning "$out/distributed.$2.err" | tail -5; }
}
run 500 fsdp "stock,no hooks,checkpointing,float8,offload(then=float8),budget,budget as checkpointing,cudagraphs,float8 cudagraphs,offload,offload(then=float8) one graph,save_on_cpu"
run 240 ddp "stock,checkpointing,float8,offload(then=float8),budget of twice checkpointing"
run 120 tp "stock,checkpointing,float8,offload(then=float8),budget of twice checkpointing"
[ "$gpus" -lt 4 ] || run 150 fsdp_tp "stock,checkpointing,offload(then=float8) 12 ms again,budget as checkpointing"
[ "$gpus" -lt 4 ] || run 150 pipeline "stock,checkpointing,offload(then=float8) 12 ms again,budget as checkpointing"
