# llama3_8b: Llama 3 8B, dense, 8 GPUs
#
# Size:    32 layers, hidden 4096, 32 heads in 8 groups, MLP of width 14336. 8.03 billion parameters.
# Model:   config.json of meta-llama/Meta-Llama-3-8B.
# Ranks:   Megatron Bridge, src/megatron/bridge/perf_recipes/llama/h100/llama3.py, llama3_8b_pretrain_8gpu_h100_bf16_config:
#          CP 2, microbatch 1 and 128 sequences per step on 8 H100s.
# See:     fgoffload plan llama3_8b --gpu h100 --offload-memory-budget 60GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=8

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
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
    --context-parallel-size 2
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
)

# Attention modules only. fgoffload plan ignores this list and chooses among all tags, including those of the MLP.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj
)
