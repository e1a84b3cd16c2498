# qwen3_235b_a22b: Qwen3-235B-A22B, deep MoE, 256 GPUs
#
# Size:    94 layers, hidden 4096, 64 heads in 4 groups; 128 experts of width 1536, 8 per token.
#          235 billion parameters, 22 billion active.
# Model:   config.json of Qwen/Qwen3-235B-A22B.
# Ranks:   Megatron-MoE-ModelZoo, best_practice/qwen3/run_h100_235b.sh and model_configs/benchmarking/Qwen3-235B-A22B.yaml:
#          TP 2, PP 8, VP 4, EP 32, microbatch 1 and 2048 sequences per step on 32 nodes of 8 H100s. Embedding and loss count as one
#          layer each: 96 layers for 32 stages. The source recomputes moe_act and layernorm and overlaps the experts'
#          communication; here a plan decides what to recompute. The vocabulary size, 151936, is a multiple of 1187, so
#          --make-vocab-size-divisible-by 1187 avoids padding.
# See:     fgoffload plan qwen3_235b_a22b --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=256

MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288   # for dense layers; this model has none
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --seq-length 4096
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --vocab-size 151936
    --make-vocab-size-divisible-by 1187
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
    --moe-ffn-hidden-size 1536
    --moe-router-topk 8
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 4
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 2048
    --bf16
)

# Modules that Megatron itself can offload. fgoffload plan ignores this list and chooses among all tags.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act
)
