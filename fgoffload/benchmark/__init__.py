"""Benchmarks step time and memory of this package against the alternatives, in one run.

| part | contents |
|---|---|
| `settings` | names that users type for settings, and the Megatron flags behind them |
| `measurement` | measurements of settings, and ratios, all as plain numbers |
| `job`, `processes` | runs settings one after another, in separate processes, on every rank |
| `worker`, `runner` | the code of those processes: one setting, one model, one measurement |
| `rank_models` | the planner's model of the training, and a plan for a memory budget |
| `prediction` | predicted step time and peak, from the hardware table and from a profile |
| `results`, `report`, `frontier`, `surroundings` | CSV, JSON, tables and picture, and the machine and versions |

Importing this package does not load torch, and neither do `settings`, `measurement`, `job`, `processes` and `worker`.
"""
