# deepseek_v2_lite: DeepSeek-V2-Lite, 16B MoE with MLA, 8 GPUs
#
# Size:    27 layers (1 dense), hidden 2048, 16 heads; 64 experts of width 1408, 6 per token, and two shared
#          experts. 15.7 billion parameters, 2.4 billion active.
# Model:   config.json of deepseek-ai/DeepSeek-V2-Lite. A single linear projects the queries, so --q-lora-rank is absent.
# Ranks:   Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf and
#          model_configs/benchmarking/DeepSeek-V2-Lite.yaml: EP 8, microbatch 1 and 512 sequences per step on one node of 8 GPUs.
# See:     fgoffload plan deepseek_v2_lite --gpu h100 --offload-memory-budget 60GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=8

MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 10000
    --no-rope-fusion
    --vocab-size 102400
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rotary-scaling-factor 40
    --mscale 0.707
    --mscale-all-dim 0.707
)

MOE_ARGS=(
    --num-experts 64
    --moe-layer-freq "([0]*1+[1]*26)"
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 1.0
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
    --global-batch-size 512
    --bf16
)

# Modules that Megatron itself can offload. fgoffload plan ignores this list and chooses among all tags.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules attn_norm core_attn attn_proj mlp_norm expert_fc1 moe_act
)
