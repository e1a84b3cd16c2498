# nemotron_lightning_like: small MoE like Nemotron 3.5 Lightning
#
# Size:    6 layers, hidden 2688, 32 heads in 2 groups, 32 experts of width 1856, 6 per token, and a shared expert;
#          3.4 billion parameters. Sequences of 4096 tokens, 4 microbatches of 1 sequence per step, bf16. The original model
#          also has Mamba layers, which fgoffload train does not support.
# Purpose: tests delayed offload of expert_fc1, with recompute of moe_act and layernorm, and with CUDA graphs of attention.
# Needs:   one GPU of 80 GB, and Transformer Engine.
# See:     fgoffload train nemotron_lightning_like --steps 6
# Source:  Megatron Bridge 0.6.2, the recipe for 16 H100s.
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers ${LAYERS:-6}
    --hidden-size 2688
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --vocab-size 32000
    --transformer-impl transformer_engine
    --bf16
)

MOE_ARGS=(
    --num-experts 32
    --moe-router-topk 6
    --moe-ffn-hidden-size 1856
    --moe-shared-expert-intermediate-size 3712
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none
    --moe-aux-loss-coeff 0.0
)

GRAPH_ARGS=(
    --cuda-graph-impl transformer_engine
    --cuda-graph-modules attn
    --cuda-graph-warmup-steps 3
    --te-rng-tracker
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 10
    --lr 1e-4
    --seed 1234
)

RECOMPUTE_ARGS=(
    --recompute-granularity selective
    --recompute-modules moe_act layernorm
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules expert_fc1
    --delay-offload-until-cuda-graph
)
