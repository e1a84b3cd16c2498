"""Predicts memory and time of a training run, and finds the fastest plan within a memory budget. Needs no torch and no GPU.

    from fgoffload.planner import Hardware, ModelShape, Parallelism, plan

`entry` has an example; docs/concepts/planner.md explains how it works. Folders:

| folder | contents | start with |
|---|---|---|
| `ranks` | passes and layers of each pipeline rank | `rank_model`, `layer_model`, `schedule` |
| `model` | shape of a model, and its split over ranks | `model_shape`, `parallelism`, `huggingface` |
| `operations` | operations of a layer, for any device | `ops`, `attention_ops`, `mlp_ops` |
| `memory` | bytes | `saved_bytes`, `static_memory` |
| `timing` | seconds, from a device's peaks or from measurements | `hardware`, `op_times`, `profile` |
| `simulation` | step time, peak memory and waits under a plan | `simulator`, `layer_choice`, `timeline` |
| `solving` | the plan, and baselines to compare it with | `solver`, `megatron_flags` |

Imports go one way. `model`, `operations`, `memory` and `timing` build on each other in this order, and `model_ranks` makes
`ranks` from them. `simulation`, and `solving` on top of it, know only `ranks`, no model and no device.
"""

from fgoffload.planner.entry import PlanReport, plan
from fgoffload.planner.model.layer_shape import ExpertsShape, RouterShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model_ranks import Assumptions, build_ranks
from fgoffload.planner.timing.hardware import Hardware, Link, get_hardware

__all__ = [
    "Assumptions",
    "ExpertsShape",
    "Hardware",
    "LatentAttention",
    "Link",
    "ModelShape",
    "Parallelism",
    "PlanReport",
    "RouterShape",
    "build_ranks",
    "get_hardware",
    "plan",
]
