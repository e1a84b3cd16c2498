# w2_moe: six wide MoE layers, one GPU, the reference workload
#
# Size:    6 layers, hidden 4096, 32 heads, 16 experts of width 2048, 4 per token; 3.1 billion parameters.
#          Sequences of 4096 tokens, 4 microbatches of 2 sequences per step, bf16. Weights and gradients take 11.5 GiB. A layer
#          saves 1.13 GiB per microbatch (docs/reference/saved_bytes.md).
# Purpose: compares settings with fgoffload bench (docs/how_to/benchmark.md): forward and backward, without an optimizer.
# Needs:   one GPU of 80 GB or more, and Transformer Engine.
# See:     bash examples/benchmarks/frontier_w2.sh, which sets the flags and variables of the published results
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 6
    --hidden-size 4096
    --num-attention-heads 32
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
    --num-experts 16
    --moe-router-topk 4
    --moe-ffn-hidden-size 2048
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
