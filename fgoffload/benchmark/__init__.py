"""The benchmark: step time and memory of this package beside what users would pick instead, in one run.

| part | what it gives |
|---|---|
| `settings` | what is measured: names that users type, and the Megatron flags behind them |
| `steps`, `measurement` | what a step computed, what a setting measured, and ratios: numbers in, numbers out |
| `model_flop` | the floating-point operations of a model, for its utilization |
| `job`, `processes` | settings in turn, in processes of their own, on every rank |
| `worker`, `runner` | the other end: one setting, one model, one measurement |
| `rank_models`, `budget_plans` | what the planner takes the training for, and a plan for a memory budget |
| `forecaster`, `prediction` | predicted step time and peak, from the hardware table and from a profile |
| `results`, `report`, `frontier`, `surroundings` | CSV, JSON, tables and picture, and what it ran on |

Importing this package loads no torch; `worker`, `runner`, `loading`, `rank_models`, `forecaster` and `traces` do.
"""
