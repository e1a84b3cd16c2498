# gpt_22b: GPT 22B, dense, 8 GPUs
#
# Size:    48 layers, hidden 6144, 64 heads, MLP of width 24576. 22 billion parameters.
# Model:   Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, table 3.
# Ranks:   the same paper: TP 8 with sequence parallelism, microbatch 4 and 4 sequences per step on 8 A100s.
# See:     fgoffload plan gpt_22b --gpu a100
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=8

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 6144
    --num-attention-heads 64
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --transformer-impl transformer_engine
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 4
    --bf16   # the paper uses fp16, which has the same size and speed as bf16
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj
)
