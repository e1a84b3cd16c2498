# launch_bound_graphs: launch_bound_moe with CUDA graphs for each layer
#
# Size:    as launch_bound_moe.sh: 12 layers, hidden 2048, 16 experts, 4 per token; 2.0 billion parameters.
#          Transformer Engine captures attention, the router and the dispatcher's preprocessing after 3 eager steps.
# Purpose: measures offload with CUDA graphs. Without graphs, the step is launch-bound.
# Needs:   one GPU of 40 GB or more, and Transformer Engine.
# See:     fgoffload bench launch_bound_graphs --steps 20 --repeats 5 \
#            --settings megatron:expert_fc1 ours:expert_fc1 megatron:expert_fc1~delay ours:expert_fc1~delay
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
    --moe-router-load-balancing-type none   # random tokens spread almost evenly over the experts
    --moe-aux-loss-coeff 0.0
)

GRAPH_ARGS=(
    --cuda-graph-impl transformer_engine
    --cuda-graph-modules attn moe_router moe_preprocess
    --cuda-graph-warmup-steps 3
    --te-rng-tracker
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
    --offload-modules expert_fc1
)
