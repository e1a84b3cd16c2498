# dense_full_iteration: dense GPT, the whole iteration in one CUDA graph
#
# Size:    12 layers, hidden 2048, 16 heads, gated MLP of width 8192; 0.9 billion parameters. Sequences of 2048 tokens,
#          4 microbatches of 2 sequences per step, bf16.
# Purpose: tests offload inside a full-iteration graph, whose replay runs no Python code.
# Needs:   one GPU of 40 GB or more, Transformer Engine, and megatron-core 0.18 or newer.
# See:     fgoffload bench dense_full_iteration --settings megatron:core_attn+attn_proj ours:core_attn+attn_proj
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 2048
    --ffn-hidden-size 8192
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

GRAPH_ARGS=(
    --cuda-graph-impl full_iteration
    --cuda-graph-warmup-steps 3
    --te-rng-tracker
    --fine-grained-offloading-max-inflight-offloads 2   # required by Megatron-Core for full-iteration graphs
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
    --offload-modules core_attn attn_proj
)
