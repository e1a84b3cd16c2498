#!/bin/bash
WORLD_SIZE=$((8 * ($NODES + 1)))
LOGS=${1:-"logs/x"} && mkdir -p "$(dirname "$LOGS")"
DISTRIBUTED_ARGS=( --nproc_per_node 8 --nnodes $NODES )
TYPE="fp8"; TYPE_ARGS=()
if [[ "$TYPE" == "fp8" ]] || [ -z "$OTHER" ]; then TYPE_ARGS+=( "--fp8-format hybrid" "--bf16" ); else TYPE_ARGS=(--fp16); fi
[[ "$PRECISION" = fp16 ]] && TYPE_ARGS=(--fp16)
[ "$TYPE" = fp8 ] || TYPE_ARGS=(--fp16)
if [ -n "${KEY}" ]; then
    if [ 1 -gt 0 ]; then TYPE_ARGS+=(--wandb); fi
fi
if [ ! -f pretrain.py ]; then
    echo "none"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain.py \
    --num-gpus $WORLD_SIZE --log $LOGS ${TYPE_ARGS[@]} 2>&1 | tee log
