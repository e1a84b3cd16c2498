"""Flags of Megatron that no plan is made from: those that change nothing in one, and those that would, and are not known.

Listed one by one, so that a flag that is misspelt is in neither list. Every flag has its `--no-...` as well.

Source: megatron/training/arguments.py and the configuration classes that it reads, Megatron-LM core 0.16.1, 0.19.0 and its main
branch of August 2026; and our own flags of offload, as `add_fine_grained_offload_args` has them.
"""

_OFFLOAD_AND_RECOMPUTE = """
    --activation-offload-fraction --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks
    --fine-grained-activation-offloading --offload-host-budget --offload-memory-budget --offload-modules --offload-plan
    --recompute-activations --recompute-granularity --recompute-method --recompute-modules --recompute-num-layers
"""
"""Which the plan itself decides, or the command line of a plan."""

_LEARNING = """
    --adam-beta1 --adam-beta2 --adam-eps --clip-grad --decoupled-lr --decoupled-min-lr --end-weight-decay --head-lr-mult
    --hysteresis --initial-loss-scale --loss-scale --loss-scale-window --lr --lr-decay-iters --lr-decay-samples
    --lr-decay-steps --lr-decay-style --lr-warmup-fraction --lr-warmup-init --lr-warmup-iters --lr-warmup-samples
    --lr-warmup-steps --lr-wsd-decay-iters --lr-wsd-decay-samples --lr-wsd-decay-style --min-loss-scale --min-lr
    --sgd-momentum --start-weight-decay --use-checkpoint-opt-param-scheduler --override-opt-param-scheduler --wd-incr-steps
    --weight-decay --weight-decay-incr-style --wsd-decay-steps
"""

_LENGTH = """
    --eval-global-batch-size --eval-interval --eval-iters --eval-micro-batch-size --exit-duration-in-mins --exit-interval
    --exit-on-missing-checkpoint --exit-signal --exit-signal-handler --exit-signal-handler-for-dataloader
    --exit-signal-handler-for-training --full-validation --iterations-to-skip --manual-gc --manual-gc-eval
    --manual-gc-interval --skip-train --start-eval-at-iter --test-mode --train-iters --train-samples --train-sync-interval
    --validation-set-names
"""
"""How long a training goes on, and how often it stops to evaluate."""

_DATA = """
    --create-attention-mask-in-dataloader --data-args-path --data-cache-path --data-path --data-per-class-fraction
    --dataloader-type --eod-mask-loss --legacy-tokenizer --merge-file --mid-level-dataset-surplus --mmap-bin-files --mock-data
    --multiple-validation-sets --null-tokenizer-eod-id --null-tokenizer-pad-id --num-dataset-builder-threads --num-workers
    --object-storage-cache-path --per-dataset-sequences-path --per-split-data-args-path --reset-attention-mask
    --reset-position-ids --split --test-data-path --tiktoken-num-special-tokens --tiktoken-pattern --tiktoken-special-tokens
    --tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens --tokenizer-hf-no-use-fast
    --tokenizer-hf-use-fast --tokenizer-metadata --tokenizer-model --tokenizer-sentencepiece-ignore-extra-whitespaces
    --tokenizer-sentencepiece-legacy --tokenizer-special-tokens --tokenizer-type --train-data-path --trust-remote-code
    --use-tokenizer-model-from-checkpoint-args --valid-data-path --vocab-extra-ids --vocab-file
"""

_CHECKPOINTS = """
    --async-save --async-strategy --auto-detect-ckpt-format --ckpt-assume-constant-structure --ckpt-convert-format
    --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format --ckpt-format --ckpt-fully-parallel-load
    --ckpt-fully-parallel-save --ckpt-fully-parallel-save-process-group --ckpt-load-validate-sharding-integrity --ckpt-step
    --dist-ckpt-format --dist-ckpt-optim-fully-reshardable --dist-ckpt-save-pre-mcore-014 --dist-ckpt-strictness
    --dist-ckpt-workers --distrib-optim-fully-reshardable-mem-efficient --finetune --load --load-main-params-from-ckpt
    --load-optim --load-rng --non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-algo
    --non-persistent-local-ckpt-dir --non-persistent-save-interval --override-ckpt-iteration --persistent-save-interval
    --pretrained-checkpoint --replication --replication-factor --replication-jump --save --save-activations-interval
    --save-config-filepath --save-dgrads-interval --save-interval --save-optim --save-params-interval --save-retain-interval
    --save-rng --save-tokenizer-assets --save-tokens-per-expert-interval --save-wgrads-interval --use-checkpoint-args
    --use-dist-ckpt --use-mp-args-from-checkpoint-args --use-persistent-ckpt-worker
"""

_LOGS_AND_CHECKS = """
    --barrier-with-level-1-timing --check-for-large-grads --check-for-nan-in-loss --check-for-nan-in-loss-and-grad
    --check-for-spiky-loss --check-weight-hash-across-dp-replicas-interval --config-logger-dir --disable-straggler-on-startup
    --filter-warnings --gpu-sniff-test-interval --log-device-memory-used --log-energy --log-interval
    --log-l2-norm-grad-to-tensorboard --log-loss-scale-to-tensorboard --log-max-attention-logit --log-memory-interval
    --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-progress --log-runtime-to-tensorboard
    --log-straggler --log-throughput --log-throughput-to-tensorboard --log-timers-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --logging-level --memory-keys --memory-snapshot-path
    --moe-per-layer-logging --nvtx-ranges --one-logger --one-logger-async --one-logger-project --one-logger-run-name --profile
    --profile-ranks --profile-step-end --profile-step-start --pytorch-profiler-collect-callstack
    --pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes --record-memory-history --record-shapes --rerun-mode
    --result-rejected-tracker-filename --straggler-ctrlr-port --straggler-minmax-count --tensorboard-dir
    --tensorboard-log-interval --tensorboard-queue-size --throughput-window-size --timing-log-level --timing-log-option
    --use-pytorch-profiler --wandb-entity --wandb-exp-name --wandb-project --wandb-save-dir
"""

_RANKS = """
    --data-parallel-random-init --ddp-average-in-collective --ddp-bucket-size --ddp-num-buckets
    --ddp-pad-buckets-for-high-nccl-busbw --distributed-backend --distributed-timeout-minutes
    --distributed-timeout-seconds-after-init --local-rank --overlap-grad-reduce --overlap-param-gather --use-tp-pp-dp-mapping
"""

_MODEL = """
    --attention-dropout --cuda-graph-warmup-steps --embedding-init-method-std --enable-experimental --init-method-std
    --init-method-xavier-uniform --moe-router-bias-update-rate --moe-router-group-topk
    --moe-router-num-groups --moe-router-topk-scaling-factor --mscale --mscale-all-dim --mtp-loss-scaling-factor
    --norm-epsilon --rope-scaling-factor --rope-type --rotary-base --rotary-scaling-factor
    --rotary-seq-len-interpolation-factor --seed --te-rng-tracker --use-cpu-initialization --use-flash-attn
    --use-mcore-models --use-rope-scaling --yarn-beta-fast --yarn-beta-slow --yarn-original-max-position-embeddings
"""

WITHOUT_EFFECT = frozenset(
    " ".join((_OFFLOAD_AND_RECOMPUTE, _LEARNING, _LENGTH, _DATA, _CHECKPOINTS, _LOGS_AND_CHECKS, _RANKS, _MODEL)).split()
)
"""Flags that change neither what is saved nor, to the planner, how long it takes."""

_MEMORY = """
    --batch-p2p-comm --cpu-offloading --cpu-offloading-activations --cpu-offloading-double-buffering
    --cpu-offloading-num-layers --cpu-offloading-weights
    --cuda-graph-retain-backward-graph --cuda-graph-use-single-mempool --data-parallel-sharding-strategy
    --ddp-reduce-scatter-with-fp32-accumulation --defer-embedding-wgrad-compute
    --delay-wgrad-compute --distribute-saved-activations --empty-unused-memory-level --enable-cuda-graph --external-cuda-graph
    --fine-grained-offloading-max-inflight-offloads --fp8-param --fp8-param-gather --fsdp-double-buffer
    --keep-fp8-transpose-cache --mlp-chunks-for-training --moe-layer-recompute --moe-paged-stash
    --moe-paged-stash-buffer-size-factor-cpu --moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-page-size
    --num-distributed-optimizer-instances --optimizer-cpu-offload --optimizer-offload-fraction --outer-dp-sharding-strategy
    --overlap-cpu-optimizer-d2h-h2d --reuse-grad-buf-for-mxfp8-param-ag --use-megatron-fsdp --use-nccl-ub --use-torch-fsdp2
    --wgrad-deferral-limit
"""

_LAYERS = """
    --activation-func --activation-func-clamp-value --activation-func-fp8-input-store --apply-layernorm-1p
    --apply-query-key-layer-scaling --apply-residual-connection-post-layernorm --attention-output-gate
    --attention-softmax-in-fp32 --bias-gelu-fusion --cross-entropy-fusion-impl
    --cross-entropy-loss-fusion --experimental-attention-variant --fp32-residual-connection --fp4-format --fp4-recipe
    --fused-single-qkv-rope --glu-linear-offset --heterogeneous-layers-config-path --hybrid-layer-pattern
    --masked-softmax-fusion --memory-efficient-layer-norm --mla-down-proj-fusion --moe-apply-probs-on-input
    --moe-deepep-num-sms --moe-enable-deepep --moe-expert-capacity-factor --moe-flex-dispatcher-backend --moe-input-jitter-eps
    --moe-latent-size --moe-pad-expert-input-to-capacity --moe-router-fusion --moe-router-padding-for-fp8
    --moe-router-padding-for-quantization --moe-router-topk-limited-devices --moe-shared-expert-gate --moe-token-drop-policy
    --moe-use-legacy-grouped-gemm --moe-use-upcycling --moe-z-loss-coeff --mtp-use-repeated-layer --persist-layer-norm
    --qk-clip --qk-l2-norm --relative-attention-num-buckets --spec --squared-relu --te-precision-config-file
    --use-transformer-engine-op-fuser
"""

_SCHEDULE = """
    --cp-comm-type --deallocate-pipeline-outputs --decrease-batch-size-if-needed --ep-overlap-early-attn-memory-release
    --hierarchical-context-parallel-sizes --hybrid-context-parallel --overlap-p2p-comm --overlap-p2p-communication
    --overlap-p2p-communication-warmup-flush --overlap-param-gather-with-optimizer-step --rampup-batch-size
    --scatter-gather-tensors-in-pipeline --step-batch-size-schedule --tp-comm-atomic-ag --tp-comm-atomic-rs
    --tp-comm-bulk-dgrad --tp-comm-bulk-wgrad --tp-comm-overlap --tp-comm-overlap-ag --tp-comm-overlap-cfg
    --tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --tp-comm-split-ag --tp-comm-split-rs --tp-only-amax-red --use-sharp
    --variable-seq-lengths
"""

NOT_COVERED = frozenset(" ".join((_MEMORY, _LAYERS, _SCHEDULE)).split())
"""Flags that change memory or times in ways that no plan knows."""
