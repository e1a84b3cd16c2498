"""Predicts memory and step time of a training run, and finds the fastest plan within a memory budget, without torch or a GPU.

    from fgoffload.planner import Hardware, ModelShape, Parallelism, plan

`entry` has an example; docs/concepts/planner.md explains the planner. W2 is the model that arguments/w2_moe.sh trains. Folders:

| folder | contents | start with |
|---|---|---|
| `ranks` | models of pipeline ranks: layers and order of passes | `rank_model`, `layer_model`, `schedule` |
| `model` | model shapes and parallel sizes | `model_shape`, `parallelism`, `huggingface` |
| `operations` | operations of a layer, independent of the device | `ops`, `attention_ops`, `mlp_ops` |
| `memory` | bytes of saved tensors, temporaries and static memory | `saved_bytes`, `static_memory` |
| `timing` | times, from a device's peak rates or from measurements | `hardware`, `op_times`, `profile` |
| `simulation` | step time, peak memory and waits under a plan | `simulator`, `layer_choice`, `timeline` |
| `solving` | search for a plan, and the baselines | `solver`, `megatron_flags` |

Imports point one way: `timing` uses `memory`, `memory` uses `operations`, and `operations` uses `model`. `model_ranks` uses
all four to build the models in `ranks`. `simulation` uses only `ranks`, and `solving` uses `simulation` and `ranks`.
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
