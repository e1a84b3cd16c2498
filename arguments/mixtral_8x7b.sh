# mixtral_8x7b: Mixtral 8x7B, 47B MoE with few large experts, 64 GPUs
#
# Size:    32 layers, hidden 4096, 32 heads in 8 groups; 8 experts of width 14336, 2 per token.
#          46.7 billion parameters, 12.9 billion active.
# Model:   config.json of mistralai/Mixtral-8x7B-v0.1.
# Ranks:   Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf and model_configs/benchmarking/Mixtral-8x7B.yaml:
#          PP 4, VP 8, EP 8, microbatch 1 and 256 sequences per step on 8 nodes of 8 GPUs.
# See:     fgoffload plan mixtral_8x7b --gpu h100 --offload-memory-budget 60GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=64

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --vocab-size 32000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 8
    --expert-model-parallel-size 8
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
)

# Modules that Megatron itself can offload. fgoffload plan ignores this list and chooses among all tags.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act
)
