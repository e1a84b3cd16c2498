# llama3_405b: Llama 3.1 405B, dense, 1024 GPUs
#
# Size:    126 layers, hidden 16384, 128 heads in 8 groups, MLP of width 53248. 405.9 billion parameters.
# Model:   config.json of meta-llama/Llama-3.1-405B.
# Ranks:   Megatron Bridge, src/megatron/bridge/perf_recipes/llama/h100, 1024 H100s: TP 8, PP 8, VP 8, CP 2, microbatch 1 and 1536
#          sequences per step. Embedding and loss count as one layer each: 128 layers for 64 stages.
# See:     fgoffload plan llama3_405b --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=1024

MODEL_ARGS=(
    --num-layers 126
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --vocab-size 128256
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --context-parallel-size 2
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --bf16
)

# Attention modules only. fgoffload plan ignores this list and chooses among all tags, including those of the MLP.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj
)
