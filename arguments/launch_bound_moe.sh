# launch_bound_moe: MoE with small ops and launch-bound steps, one GPU
#
# Size:    12 layers, hidden 2048, 16 heads, 16 experts of width 1408, 4 per token; 2.0 billion parameters.
#          Sequences of 2048 tokens, 4 microbatches of 2 sequences per step, bf16.
# Purpose: measures the CPU time of an offload engine, which adds to a launch-bound step. CPU times vary by 5 to 10%, so compare
#          many short repeats, each with its own baseline.
# Needs:   one GPU of 40 GB or more, and Transformer Engine.
# See:     fgoffload bench launch_bound_moe --settings megatron ours --repeats 5
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
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
    --num-experts 16
    --moe-router-topk 4
    --moe-ffn-hidden-size 1408
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none   # random tokens spread almost evenly over the experts
    --moe-aux-loss-coeff 0.0
)

TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 8
    --train-iters 10
    --lr 1e-4
    --seed 1234
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules expert_fc1
)
