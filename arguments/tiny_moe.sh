# tiny_moe: tiny MoE GPT, trains on a laptop without a GPU
#
# Size:    4 layers, hidden 128, 8 heads, 4 experts of width 256, 2 per token; 1.9 million parameters.
#          Sequences of 256 bytes, 4 microbatches of 1 sequence per step; a step takes 0.3 s on two cores.
# Purpose: demonstrates and tests offload end to end with Megatron-Core's own model and schedules.
# See:     fgoffload train tiny_moe
#          The loss falls from 5.6 to about 3.2 in 20 steps. With offload, losses and gradients are bitwise identical, and
#          the activation peak is over 60% smaller. On a CPU, offload makes steps slower, since it copies only within RAM.
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 8
    --seq-length 256
    --max-position-embeddings 256
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
)

MOE_ARGS=(
    --num-experts 4
    --moe-router-topk 2
    --moe-ffn-hidden-size 256
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 20
    --lr 1e-3
    --seed 1234
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act
    --min-offloaded-tensor-size 1024   # elements; the default of 1048576 is for larger models
    --offload-window 1MiB              # the default of 1 GiB is larger than this model
    --offload-prefetch 3MiB            # fits the attention of a layer and its neighbors, so that no reload is late
)
