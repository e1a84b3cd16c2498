# mla_moe: six MoE layers with MLA, as in DeepSeek-V2, one GPU
#
# Size:    6 layers, hidden 5120, 32 heads, latent attention with ranks of 1536 and 512, 16 experts of width 1536,
#          6 per token, two shared experts; 3.2 billion parameters. Sequences of 4096 tokens, 4 microbatches of 2 sequences per
#          step, bf16. Weights and gradients take 11.9 GiB.
# Model:   config.json of deepseek-ai/DeepSeek-V2. Each layer has one rank's share: 32 of 128 heads (4 tensor-parallel ranks), and
#          16 of 160 experts (10 expert-parallel ranks). The vocabulary is reduced from 102400 to 32000, since
#          the loss would otherwise take a large part of the step.
# Purpose: compares predictions with measurements for latent attention, whose large query, key and value can be
#          recomputed from low-rank inputs (mla_up_proj). Each expert gets 3072 tokens, so the step is not launch-bound.
# Needs:   one GPU of 80 GB or more, and Transformer Engine.
# See:     fgoffload bench mla_moe
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 6
    --hidden-size 5120
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

MLA_ARGS=(
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
)

MOE_ARGS=(
    --num-experts 16
    --moe-router-topk 6
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 3072
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
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
    --offload-modules attn_norm core_attn attn_proj expert_fc1
)
