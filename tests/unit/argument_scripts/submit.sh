#!/bin/bash
ARGS=( --num-layers ${LAYERS:-${DEFAULT_LAYERS:-61}} --moe-layer-freq [0]*3+[1]*58 )
if [ "${FSDP:-1}" = 1 ]; then
    unset OTHER
    ARGS=( "${ARGS[@]}" --use-megatron-fsdp --strategy ${STRATEGY} )
fi
COMMAND="cd ${HERE}; python ${HERE}/pretrain.py ${ARGS[@]}"
mkdir -p logs || {
    exit 1
}
sbatch <<EOF
#SBATCH --nodes=1
srun bash -c "${COMMAND}"
EOF
