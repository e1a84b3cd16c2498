"""Predicts memory and time of a training, and finds the fastest plan within a memory budget. Needs no torch and no device.

    from fgoffload.planner import Hardware, ModelShape, Parallelism, plan

`entry` has an example; docs/concepts/planner.md says how it works. What is below `plan` can be used by itself:

| folder | what it says | begin with |
|---|---|---|
| `ranks` | what each pipeline rank runs, in order | `rank_model`, `layer_model`, `schedule` |
| `model` | what a model is, and how ranks share it | `model_shape`, `parallelism`, `huggingface` |
| `operations` | what a layer has to do, for any device | `ops`, `attention_ops`, `mlp_ops` |
| `memory` | bytes | `saved_bytes`, `static_memory` |
| `timing` | seconds, from a device's peaks or from measurements | `hardware`, `op_times`, `profile` |
| `simulation` | what a plan comes to | `simulator`, `layer_choice`, `timeline` |
| `solving` | the plan, and what else users would choose | `solver`, `megatron_flags` |

Folders import one way. `model`, `operations`, `memory` and `timing` stand on each other in this order and are there to make the
`ranks`, which `model_ranks` does; `simulation`, and `solving` on top of it, know the `ranks` alone, and no model or device.
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
