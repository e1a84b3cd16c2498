# llama3_8b_layers: 28 of the 32 layers of Llama 3 8B, one 80 GB GPU
#
# Size:    28 of 32 layers, hidden 4096, 32 heads in 8 groups, MLP of width 14336, vocabulary of 128256; 7.2 billion parameters.
#          Sequences of 8192 tokens, 2 microbatches of 1 sequence per step, bf16, without an optimizer. Weights and gradients take
#          26.7 GiB. A layer saves 1.06 GiB per microbatch (docs/reference/saved_bytes.md); the loss takes a few GiB.
# Model:   config.json of meta-llama/Meta-Llama-3-8B.
# Purpose: compares settings on a dense model. LAYERS=32 trains the whole model, which takes 70.3 GiB; 28 layers leave room for
#          settings that take more memory than the baseline, such as recompute of core_attn.
# Needs:   one GPU of 80 GB or more, and Transformer Engine.
# See:     fgoffload bench llama3_8b_layers
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" ...

MODEL_ARGS=(
    --num-layers ${LAYERS:-28}
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --vocab-size 128256
    --transformer-impl transformer_engine
    --bf16
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 2
    --train-iters 10
    --lr 1e-4
    --seed 1234
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules core_attn attn_proj
)
