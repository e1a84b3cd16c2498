"""Efficiency of kernels and collectives relative to a device's peak rates, for devices without a profile.

Each field's docstring names its source. Kernels were measured on Hopper; for other devices the figures are guesses.
"""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_part, check_rate

ASSUMED_MEMORY = 0.80
"""Assumed fraction of the device's memory bandwidth that kernels reach, below the 0.90 that copies within an H100's memory
reach. With 0.80, predicted steps of W2 match measured steps on H200s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of peak rates that a step reaches (above 0, at most 1), and costs of launches and recompute."""

    matmul: float = 0.66
    """Fraction of the bf16 peak that large matrix products reach. Source: fitted to a step of Llama 3 8B on an H200, 72%
    of which is matrix products (docs/results/predictions.md). The best shapes reach 794.5 TFLOP/s (0.80) on H100 and H200 (Stas
    Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS)."""
    grouped_matmul: float = 0.68
    """Fraction of the bf16 peak that grouped matrix products of experts reach with many rows. With n rows per expert they reach
    n / (n + `grouped_rows`) of this fraction. Source: Transformer Engine 2.7 with multi-stream cuBLAS reaches 554 TFLOP/s with
    16 experts of 2048 rows and 628 with 8 experts of 4096 rows on an H100 (its pull request 2045): 0.56 and 0.63."""
    grouped_rows: float = 400.0
    """Rows per expert at which grouped matrix products reach half of `grouped_matmul`. Source: the same measurements."""
    fp8_matmul: float = 0.60
    """Fraction of the fp8 peak that large matrix products reach, not counting the casts of their inputs. Assumed. The
    best shapes reach 1403 TFLOP/s (0.71) on H100 (the table cited for `matmul`)."""
    grouped_fp8_matmul: float = 0.55
    """Fraction of the fp8 peak that the grouped matrix products of experts reach. Assumed."""
    attention_forward: float = 0.53
    """Fraction of the bf16 peak that forward attention reaches, not counting masked FLOP. Source: on an H100, with a causal
    mask, head dimension 128 and sequences of 4096, cuDNN reaches 518 and FlashAttention-3 579 TFLOP/s: 0.52 and 0.59 (Shah et
    al., FlashAttention-3, arXiv 2407.08608, figure 5)."""
    attention_backward: float = 0.48
    """Fraction of the bf16 peak that backward attention reaches. Source: figure 6 of the FlashAttention-3 paper. Without a
    mask, cuDNN reaches 499 and FlashAttention-3 542 TFLOP/s: 0.50 and 0.55."""
    memory: float | None = None
    """Fraction of the memory bandwidth that kernels reach. Defaults to the measured fraction, else to `ASSUMED_MEMORY`."""
    strided_bytes_per_s: float | None = 1.55e12
    """Maximum bytes per second of element-wise kernels on strided tensors, at any memory bandwidth. None for no limit. Source:
    the activation kernels of W2, which read halves of a tensor, move 1.53 TB/s on an H100 and 1.06 times that on an H200
    (`w2_h100_kernels.csv` and `w2_h200_kernels.csv` in docs/results/runs). A guess for other devices."""
    narrow_attention: float = 0.7
    """Attention efficiency at head dimension 64 relative to 128, interpolated in between. Source:
    FlashAttention-3 reaches 400 and 410 TFLOP/s at head dimension 64 (figures 5 and 6 of its paper)."""
    attention_row_s: float = 1.2e-9
    """Minimum seconds of backward attention per query row and head; a limit for small windows. Source: 0.32 ms for 4096
    tokens, 64 heads and a window of 128 tokens in a layer of GPT-OSS 120B on an H200. A guess for other devices."""
    sink_row_s: float = 1.5e-9
    """Seconds that learned attention sinks add to backward attention per query row and head. Source: 0.4 ms for 4096 tokens and
    64 heads in a layer of GPT-OSS 120B on an H200. A guess for other devices."""
    nvlink: float = 0.80
    """Fraction of the NVLink rate that collectives reach within a domain. Source: nccl-tests on 8 H200 reach 361
    GB/s of 450 in all-gather. Ring all-reduce reaches 235 of 300 on A100, 682 of 900 on B200 and 313 of 448 on MI300X (Stas
    Bekman, Machine Learning Engineering, network)."""
    network: float = 0.90
    """Fraction of the network cards' rate that collectives reach. Source: DeepEP V1 reports 43 to 58 GB/s over 16 to 64 ranks
    with 50 GB/s network cards."""
    all_to_all: float = 0.75
    """Rate of an NCCL all-to-all relative to other collectives, within and across nodes. Fitted to steps of Qwen3-235B on 256
    H100s (tests/unit/planner/timing/published_steps.json); not measured on its own."""
    rerun_extra: float = 0.10
    """Extra time of a recompute, as a fraction of its forward time. Source: full recompute compared with profiled forward on
    H200s: 0.10 for Llama 3 8B and 0.12 for multi-latent attention with experts. For W2, whose dispatchers synchronize in
    forward, the fraction was -0.04, for unknown reasons."""
    kernel_start_s: float = 3e-6
    """Gap between consecutive kernels on the device, in seconds. Assumed."""
    host_s_per_launch: float = 25e-6
    """Host seconds per kernel launch. A layer takes at least the sum of its launch times. Source: traces show 9 ms of host time
    for forward and backward of a W2 layer on an H200, and 13 ms for a layer of GPT-OSS 120B on H100. Small models may need
    twice as much (docs/results/host_overhead.md)."""
    collective_start_s: float = 20e-6
    """Seconds before the first byte of a collective moves. Assumed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "strided_bytes_per_s":
                check_rate(field.name, value)
            elif field.name in _FROM_ZERO:
                if not 0 <= value < math.inf:
                    raise ConfigError(
                        f"{field.name} {value} must be finite and at least 0. Use a number, for example {field.default}."
                    )
            elif value is not None or field.default is not None:
                check_part(field.name, value, example=field.default or ASSUMED_MEMORY)


_FROM_ZERO = (
    "rerun_extra",
    "grouped_rows",
    "attention_row_s",
    "sink_row_s",
    "kernel_start_s",
    "host_s_per_launch",
    "collective_start_s",
)
"""Fields that can be 0 or exceed 1."""
