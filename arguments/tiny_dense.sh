# tiny_dense: tiny dense GPT, trains on a laptop without a GPU
#
# Size:    4 layers, hidden 128, 8 heads, MLP of width 512; 1.1 million parameters. Sequences of 256 bytes, 4 microbatches
#          of 1 sequence per step; a step takes 0.3 s on two cores.
# Purpose: tests offload in a model without experts, as the counterpart of tiny_moe.sh.
# See:     fgoffload train tiny_dense
#          The loss falls from 5.5 to about 3.2 in 20 steps. With offload, losses and gradients are bitwise identical, and
#          the activation peak is about half as large, since this file does not offload the MLP.
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 512
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

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 20
    --lr 1e-3
    --seed 1234
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm
    --min-offloaded-tensor-size 1024   # elements; the default of 1048576 is for larger models
    --offload-window 1MiB              # the default of 1 GiB is larger than this model
    --offload-prefetch 3MiB            # fits the attention of a layer and its neighbors, so that no reload is late
)
