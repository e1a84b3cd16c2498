# mla_moe: six layers with multi-latent attention and many small experts, as in DeepSeek-V2-Lite, on one GPU.
#
# Size:    6 layers, hidden 2048, 16 heads, latent attention with ranks of 512, 64 experts of width 1408 of which each token
#          takes 6, two shared experts; 3.9 billion parameters. Sequences of 4096 tokens, 4 microbatches of 2 sequences a step,
#          bf16. Weights and gradients take 14.6 GiB.
# Source:  sizes of a layer: config.json of deepseek-ai/DeepSeek-V2-Lite, which has no rank for queries and a dense first layer.
# Purpose: settings side by side where attention saves most, and can be recomputed from its low ranks (mla_up_proj).
# Needs:   one GPU of 80 GB or more, and Transformer Engine.
# See:     fgoffload bench arguments/mla_moe.sh
#
# Bash arrays as Megatron-LM's examples have them: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 6
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --vocab-size 102400
    --transformer-impl transformer_engine
    --bf16
)

MLA_ARGS=(
    --multi-latent-attention
    --q-lora-rank 512
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
)

MOE_ARGS=(
    --num-experts 64
    --moe-router-topk 6
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
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
