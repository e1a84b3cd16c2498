# gpt_530b: GPT 530B, dense, 280 GPUs
#
# Size:    105 layers, hidden 20480, 128 heads, MLP of width 81920. 530 billion parameters.
# Model:   Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, table 3.
# Ranks:   the same paper: TP 8 with sequence parallelism, PP 35, VP 3, microbatch 1 and 280 sequences per step on
#          280 A100s.
# See:     fgoffload plan gpt_530b --gpu a100
#
# Bash arrays, as in Megatron-LM's examples: source this file and pass "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" ...

NUM_GPUS=280

MODEL_ARGS=(
    --num-layers 105
    --hidden-size 20480
    --num-attention-heads 128
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
    --pipeline-model-parallel-size 35
    --num-virtual-stages-per-pipeline-rank 3
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 280
    --bf16   # the paper uses fp16, which has the same size and speed as bf16
)

OFFLOAD_ARGS=(
    --fine-grained-activation-offloading
    --offload-modules qkv_linear core_attn attn_proj
)
