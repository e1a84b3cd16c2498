# w2_moe_1f1b: w2_moe on two GPUs under the 1F1B schedule
#
# Size:    12 layers, hidden 4096, 32 heads, 16 experts of width 2048, 4 per token; 5.9 billion parameters.
#          Sequences of 4096 tokens, 8 microbatches of 2 sequences per step, bf16. The first stage holds the activations of two
#          microbatches at once, the second those of one.
# Purpose: compares settings in a pipeline, in which copies can overlap the passes of other microbatches.
# Needs:   two GPUs of 80 GB or more in one machine, and Transformer Engine. fgoffload bench starts both processes itself.
# See:     fgoffload bench w2_moe_1f1b
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 12
    --pipeline-model-parallel-size 2
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
    --global-batch-size 16
    --train-iters 10
    --lr 1e-4
    --seed 1234
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules expert_fc1
)
