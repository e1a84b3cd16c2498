# kimi_k2: Kimi K2, 1T MoE with MLA, 1024 GPUs
#
# Size:    61 layers (1 dense), hidden 7168, 64 heads; 384 experts of width 2048, 8 per token, and a shared expert.
#          1.03 trillion parameters, 32.9 billion active. The report, arXiv 2507.20534, gives 1.04 trillion and 32.6 billion.
# Model:   config.json of moonshotai/Kimi-K2-Instruct.
# Ranks:   Megatron Bridge, src/megatron/bridge/perf_recipes/kimi/h100/kimi_k2.py, kimi_k2_pretrain_1024gpu_h100_bf16_config:
#          TP 8, PP 16, VP 2, EP 64, microbatch 1 and 8192 sequences per step on 1024 H100s. The source recomputes mla_up_proj and
#          mlp; here a plan decides what to recompute.
# See:     fgoffload plan kimi_k2 --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=1024

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 64
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 50000
    --no-rope-fusion
    --vocab-size 163840
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rotary-scaling-factor 32
    --mscale 1.0
    --mscale-all-dim 1.0
)

MOE_ARGS=(
    --num-experts 384
    --moe-layer-freq "([0]*1+[1]*60)"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-topk-scaling-factor 2.827
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout "Et|(tt|)*30L"   # 32 stages, 2 on each of 16 ranks; the last stage has only the loss
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8192
    --bf16
)

# Modules that Megatron itself can offload. fgoffload plan ignores this list and chooses among all tags.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules attn_norm core_attn attn_proj mlp_norm expert_fc1 moe_act
)
