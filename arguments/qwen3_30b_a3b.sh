# qwen3_30b_a3b: Qwen3-30B-A3B, MoE with many small experts, 32 GPUs
#
# Size:    48 layers, hidden 2048, 32 heads in 4 groups; 128 experts of width 768, 8 per token.
#          30.5 billion parameters, 3.3 billion active.
# Model:   config.json of Qwen/Qwen3-30B-A3B.
# Ranks:   Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf and model_configs/benchmarking/Qwen3-30B-A3B.yaml:
#          EP 8, microbatch 1 and 256 sequences per step on 4 nodes of 8 GPUs.
# See:     fgoffload plan qwen3_30b_a3b --gpu h100 --offload-memory-budget 60GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=32

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144   # for dense layers; this model has none
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --seq-length 4096
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --vocab-size 151936
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
)

MOE_ARGS=(
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
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
