"""What a training would need, and the fastest way to stay within a memory budget: plain numbers, no torch and no device.

    from fgoffload.planner import Hardware, ModelShape, Parallelism, plan

`planning` has an example; docs/planner.md says how it works and how right it is. What is below `plan` can be used by itself:

| modules | what they say |
|---|---|
| `model_shape`, `parallelism`, `huggingface` | what a model is, and how ranks share it |
| `layer_shape`, `saved_bytes`, `static_memory` | bytes |
| `hardware`, `op_times`, `edge_segments`, `link_rates`, `profile` | seconds, from a device's peaks or from measurements |
| `schedule`, `layer_model`, `rank_model`, `model_ranks` | what each pipeline rank runs, in order |
| `layer_choice`, `simulator`, `timeline` | what a plan comes to |
| `solver`, `megatron_flags` | the plan, and what else users would choose |
"""

from fgoffload.planner.hardware import Hardware, Link, get_hardware
from fgoffload.planner.layer_shape import ExpertsShape, RouterShape
from fgoffload.planner.model_ranks import Assumptions, build_ranks
from fgoffload.planner.model_shape import LatentAttention, ModelShape
from fgoffload.planner.parallelism import Parallelism
from fgoffload.planner.planning import PlanReport, plan

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
