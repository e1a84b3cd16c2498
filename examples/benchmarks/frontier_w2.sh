#!/usr/bin/env bash
# Compares all systems on the reference workload W2. The plot at the top of the README shows the results on an H100.
#
#     bash examples/benchmarks/frontier_w2.sh [--out FOLDER] [other options of fgoffload bench, or Megatron's flags]
#
# The script measures a profile and makes plans from it for four memory budgets. It then measures recompute, fgoffload with
# selected modules and with these plans, the offload of Transformer Engine and of PyTorch, and Megatron-Core's own engine in a
# separate process. All settings run twice. Options after the command override those in the script: `--repeats 3` adds intervals.
#
# The script changes to the repository's root, so paths and --out (by default bench_w2_moe) are relative to the root. It sets two
# environment variables. CUDA_DEVICE_MAX_CONNECTIONS is also set by Megatron's launch scripts. With
# NVTE_USE_CUTLASS_GROUPED_GEMM, one launch runs the linears of all experts in a layer, which avoids most kernel launches.
#
# The script needs one idle GPU with 80 GB or more from the hardware table, such as an H100 or H200; Transformer Engine; and
# matplotlib for the plot. It takes about twenty minutes.
#
# Expected output: the progress of each setting, then a table of all settings with p20 and p80 of their step times, the ratio to
# the baseline in each repeat, memory and predictions. For each budget, the output shows the fastest setting of each system. The
# --out folder contains the table as Markdown, results.csv with a row per setting and repeat, the plans, and frontier.png with
# peak memory against step time. docs/results/megatron.md shows our results.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_USE_CUTLASS_GROUPED_GEMM=1

fgoffload bench arguments/w2_moe.sh --no-bias-swiglu-fusion --moe-permute-fusion --rope-fusion --profile --baseline-every 5 \
  --budgets 20.2GiB 18.9GiB 16.5GiB 14.6GiB --settings baseline recompute:full ours:layer_input/full \
  recompute:layernorm+moe_act recompute:layernorm+moe ours:expert_fc1 ours:qkv_linear/moe_act ours:expert_fc1/moe_act \
  ours:qkv_linear/layernorm+moe_act ours:expert_fc1/layernorm+moe_act megatron:qkv_linear/moe_act megatron:expert_fc1/moe_act \
  te-layers:2 save_on_cpu --steps 5 --warmup 2 --repeats 2 "$@"
