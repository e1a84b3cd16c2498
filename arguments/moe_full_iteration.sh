# moe_full_iteration: launch_bound_moe, the whole iteration in one CUDA graph
#
# Size:    as launch_bound_moe.sh: 12 layers, hidden 2048, 16 experts, 4 per token; 2.0 billion parameters.
#          Each expert gets a fixed number of tokens, its capacity: extra tokens are dropped, and unused capacity is padded.
# Purpose: tests offload inside a full-iteration graph for a model with experts.
# Needs:   one GPU of 40 GB or more, Transformer Engine, and megatron-core 0.18 or newer.
# See:     fgoffload bench moe_full_iteration --settings megatron:core_attn+attn_proj ours:core_attn+attn_proj
#
# With these flags, the host does not wait for the device. Padding to capacity fixes all sizes before the router runs, so the
# dispatcher copies no counts to the host and never synchronizes (`_maybe_dtoh_and_synchronize`, token_dispatcher.py of
# megatron-core 0.19.2). A capacity without padding would make the host wait even earlier. The permutation is unfused, since
# the fused permutation does not support padding.
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
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

MOE_ARGS=(
    --num-experts 16
    --moe-router-topk 4
    --moe-ffn-hidden-size 1408
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-expert-capacity-factor 1.0
    --moe-pad-expert-input-to-capacity
    --moe-token-drop-policy probs
    --no-moe-permute-fusion
    --moe-router-load-balancing-type none   # random tokens spread almost evenly over the experts
    --moe-aux-loss-coeff 0.0
)

GRAPH_ARGS=(
    --cuda-graph-impl full_iteration
    --cuda-graph-warmup-steps 3
    --te-rng-tracker
    --fine-grained-offloading-max-inflight-offloads 2   # required by Megatron-Core for full-iteration graphs
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
    --offload-modules core_attn attn_proj
)
