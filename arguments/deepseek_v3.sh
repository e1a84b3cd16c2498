# deepseek_v3: DeepSeek-V3, 671B MoE with MLA, 1024 GPUs
#
# Size:    61 layers (3 dense), hidden 7168, 128 heads; 256 experts of width 2048, 8 per token, and a shared expert.
#          671 billion parameters, 37 billion active, and 11.6 billion more in a multi-token prediction layer.
# Model:   config.json of deepseek-ai/DeepSeek-V3, and the technical report, arXiv 2412.19437, for the sequence-wise balancing loss.
# Ranks:   Megatron-MoE-ModelZoo, best_practice/deepseek-v3/run_deepseek_v3_h100.sh: TP 2, PP 8, VP 4, EP 64, microbatch 1 and
#          8192 sequences per step on 128 nodes of 8 H100s. The source uses FP8, recomputes mla_up_proj and mlp, and overlaps the
#          experts' communication. This file uses bf16, and a plan decides what to recompute.
# See:     fgoffload plan deepseek_v3 --gpu h100 --offload-memory-budget 76GiB
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=1024

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 10000
    --no-rope-fusion
    --vocab-size 129280
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
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1
)

MOE_ARGS=(
    --num-experts 256
    --moe-layer-freq "([0]*3+[1]*58)"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --pipeline-model-parallel-layout "Et|(tt|)*30mL"   # 32 stages, 4 on each of 8 ranks
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
