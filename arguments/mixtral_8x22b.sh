# mixtral_8x22b: Mixtral 8x22B, 141B MoE with few large experts, 128 GPUs
#
# Size:    56 layers, hidden 6144, 48 heads in 8 groups; 8 experts of width 16384, 2 per token.
#          140.6 billion parameters, 39.1 billion active.
# Model:   config.json of mistralai/Mixtral-8x22B-v0.1.
# Ranks:   Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf: TP 2, PP 8, VP 7, EP 8, microbatch 1 and 256 sequences per
#          step on 16 nodes of 8 GPUs.
# See:     fgoffload plan mixtral_8x22b --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=128

MODEL_ARGS=(
    --num-layers 56
    --hidden-size 6144
    --ffn-hidden-size 16384
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 65536
    --position-embedding-type rope
    --rotary-base 1000000
    --vocab-size 32768
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
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 7
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
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
