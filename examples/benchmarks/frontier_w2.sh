#!/usr/bin/env bash
# The reference workload in all systems side by side: the run behind the picture at the top of the README, in one command.
#
#     bash examples/benchmarks/frontier_w2.sh [--out FOLDER] [further options of fgoffload bench, or Megatron's flags]
#
# Measures a profile, from which the plans for four memory budgets are made; recompute, this package by modules and
# by those plans, Transformer Engine's offload and PyTorch's; Megatron-Core's own engine in a process of its own. The whole list
# runs twice. What is typed behind the command comes last, and wins: `--repeats 3` has intervals.
#
# It runs from the repository's root, whatever folder it is called from: paths are relative to that, and so is --out (by default
# bench_w2_moe). Both variables are those of the results: the first as launch scripts of Megatron have it, and with the second
# Transformer Engine multiplies all experts of a layer in one launch, which spares the host most of them.
#
# Needs one GPU of 80 GB or more that the hardware table has, as an H100 or H200, with nothing else on it; Transformer Engine,
# and matplotlib for the picture. Takes about twenty minutes.
#
# What you should see: the name of each setting and the steps that it is at; then the table of all settings, with p20 and p80 of
# their steps, time over baseline in each repeat, memory, and what was predicted; and for each budget the fastest setting of each
# system. The folder has the same as a page, results.csv with a row for each setting and repeat, the plans, and frontier.png: peak
# memory against step time. docs/results/megatron.md has what came of it.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_USE_CUTLASS_GROUPED_GEMM=1

fgoffload bench arguments/w2_moe.sh --no-bias-swiglu-fusion --moe-permute-fusion --rope-fusion --profile --baseline-every 5 \
  --budgets 20.2GiB 18.9GiB 16.5GiB 14.6GiB --settings baseline recompute:full ours:layer_input/full \
  recompute:layernorm+moe_act recompute:layernorm+moe ours:expert_fc1 ours:qkv_linear/moe_act ours:expert_fc1/moe_act \
  ours:qkv_linear/layernorm+moe_act ours:expert_fc1/layernorm+moe_act megatron:qkv_linear/moe_act megatron:expert_fc1/moe_act \
  te-layers:2 save_on_cpu --steps 5 --warmup 2 --repeats 2 "$@"
