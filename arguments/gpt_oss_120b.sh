# gpt_oss_120b: gpt-oss-120b, 117B MoE with sliding windows, 64 GPUs
#
# Size:    36 layers, hidden 2880, 64 heads in 8 groups, a window of 128 tokens in every other layer; 128 experts of width 2880,
#          4 per token. 116.8 billion parameters, 5.1 billion active.
# Model:   config.json of openai/gpt-oss-120b, and the model card, arXiv 2508.10925. The model uses a clamped gate
#          (--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 in Megatron-LM) and YaRN. fgoffload train
#          supports neither, so this file uses --swiglu and plain rope, which have the same tensor sizes.
# Ranks:   Megatron Bridge, src/megatron/bridge/perf_recipes/gpt_oss/h100/gpt_oss.py,
#          gpt_oss_120b_pretrain_64gpu_h100_bf16_config, and
#          src/megatron/bridge/models/gpt_oss/gpt_oss_bridge.py: PP 4, EP 8, microbatch 1 and 1280 sequences per step on 64
#          H100s. The source recomputes layernorm and moe_act; here a plan decides what to recompute.
# See:     fgoffload plan gpt_oss_120b --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=64

MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --window-size 127,0   # the previous 127 tokens and the token itself
    --window-attn-skip-freq 2
    --softmax-type learnable
    --seq-length 4096
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 150000
    --vocab-size 201088
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --add-qkv-bias   # other linears have biases by default
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --transformer-impl transformer_engine
)

MOE_ARGS=(
    --num-experts 128
    --moe-ffn-hidden-size 2880
    --moe-router-topk 4
    --moe-router-load-balancing-type none
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1280
    --bf16
)

# Modules that Megatron itself can offload. fgoffload plan ignores this list and chooses among all tags.
OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act
)
