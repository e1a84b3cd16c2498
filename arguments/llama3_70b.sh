# llama3_70b: Llama 3 70B, dense, 64 GPUs
#
# Size:    80 layers, hidden 8192, 64 heads in 8 groups, MLP of width 28672. 70.6 billion parameters.
# Model:   config.json of meta-llama/Meta-Llama-3-70B.
# Ranks:   Megatron Bridge, src/megatron/bridge/perf_recipes/llama/h100/llama3.py, llama3_70b_pretrain_64gpu_h100_bf16_config:
#          TP 4, PP 4, VP 5, CP 2, microbatch 1 and 256 sequences per step on 64 H100s.
# See:     fgoffload plan llama3_70b --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=64

MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 5
    --context-parallel-size 2
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
)

# Attention modules only. fgoffload plan ignores this list and chooses among all tags, including those of the MLP.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj
)
