"""Efficiency of kernels, collectives and copies relative to a device's peak rates, for devices without a profile.

Each field names its source. Kernels were measured on Hopper, by others or by us; for other devices the figures are guesses.
"""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_part, check_rate

ASSUMED_MEMORY = 0.80
"""Assumed fraction of the device's memory bandwidth that kernels reach, slightly below the 0.90 of copies within an H100. With
it, steps of W2 on H200s are predicted correctly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the peak rates that are reached, above 0 and at most 1, and costs of launches and recompute."""

    matmul: float = 0.66
    """Fraction of the bf16 peak that large matrix products reach.

    Source: a step of 28 layers of Llama 3 8B on an H200 took 1375 ms, 72% of it in matrix products. With 0.66 the prediction
    is 0.2% too high (docs/results/predictions.md), with 0.70 it is 3.9% too low. The best shapes reach 794.5 TFLOP/s, 0.80, on
    H100 and H200 (Stas Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS).
    """
    grouped_matmul: float = 0.68
    """Fraction of the bf16 peak that grouped matrix products of experts reach with many rows. With n rows per expert they
    reach n / (n + `grouped_rows`) of it.

    Source: Transformer Engine 2.7 with multi-stream cuBLAS reaches 554 TFLOP/s with 16 experts of 2048 rows and 628 TFLOP/s
    with 8 of 4096 on an H100 (Transformer Engine pull request 2045): 0.56 and 0.63.
    """
    grouped_rows: float = 400.0
    """Rows per expert at which its matrix products reach half of `grouped_matmul`. Source: the same two figures."""
    fp8_matmul: float = 0.60
    """Fraction of the fp8 peak that large matrix products reach, not counting the casts of their inputs.

    Source: assumed for the shapes of model layers. The best shapes reach 1403 TFLOP/s, 0.71, on H100 (the same table).
    """
    grouped_fp8_matmul: float = 0.55
    """Fraction of the fp8 peak that the grouped matrix products of experts reach. Assumed."""
    attention_forward: float = 0.53
    """Fraction of the bf16 peak that forward attention reaches, not counting masked FLOP.

    Source: on an H100, with a causal mask, head dimension 128 and sequences of 4096, cuDNN reaches 518 and FlashAttention-3 579
    TFLOP/s: 0.52 and 0.59 (Shah et al., FlashAttention-3, arXiv 2407.08608, figure 5). A head dimension of 64 or shorter
    sequences reach less.
    """
    attention_backward: float = 0.48
    """Fraction of the bf16 peak that backward attention reaches.

    Source: figure 6 of the same paper. Without a mask, cuDNN reaches 499 and FlashAttention-3 542 TFLOP/s: 0.50 and 0.55.
    """
    memory: float | None = None
    """Fraction of the device's memory bandwidth that kernels reach. Defaults to `Hardware.memory_efficiency` if measured, and
    otherwise to `ASSUMED_MEMORY`."""
    strided_bytes_per_s: float | None = 1.55e12
    """Maximum bytes per second of element-wise kernels on strided tensors, whatever the bandwidth. None for no limit.

    Source: the kernels of W2's activation, which work on halves of a tensor with a factor per row, move 1.36 to 1.76 TB/s on an
    H100, 1.53 TB/s together, and 1.06 times that on an H200 (traces `w2_h100_kernels.csv` and `w2_h200_kernels.csv` in
    docs/results/runs). A guess for other devices.
    """
    narrow_attention: float = 0.7
    """Attention efficiency at head dimension 64 relative to 128, interpolated in between. Source: the same figures;
    FlashAttention-3 reaches 400 and 410 TFLOP/s at head dimension 64."""
    nvlink: float = 0.80
    """Fraction of the rate between devices of an NVLink domain that collectives reach.

    Source: nccl-tests on 8 H200 reach 361 GB/s in all-gather and 363 in reduce-scatter, of 450 (Stas Bekman, Machine Learning
    Engineering, network). Ring all-reduce reaches 235 of 300 on A100, 682 of 900 on B200 and 313 of 448 on MI300X (the same).
    """
    network: float = 0.90
    """Fraction of the network cards' rate that collectives reach.

    Source: DeepEP's first release reports 43 to 58 GB/s with 50 GB/s cards, for dispatch and combine over 16 to 64 ranks. This
    includes traffic within the node.
    """
    all_to_all: float = 0.75
    """Rate of an NCCL all-to-all relative to other collectives, within and across nodes. Fitted to steps of Qwen3-235B on 256
    H100 (tests/unit/planner/timing/published_steps.json); not measured on its own."""
    rerun_extra: float = 0.10
    """Extra time of a recompute, as a fraction of its forward time.

    Source: on H200s full recompute took 442 ms per step where profiled forward took 403 ms (28 layers of Llama 3 8B), and 451
    where it took 404 (multi-latent attention with experts): 0.10 and 0.12. W2, whose forward waits for the host, took 0.04
    less. We did not trace the reason.
    """
    kernel_start_s: float = 3e-6
    """Gap between consecutive kernels on the device, in seconds. Assumed."""
    host_s_per_launch: float = 25e-6
    """Host seconds per kernel launch. A layer takes at least the time of its launches.

    Source: this value reproduces the 9 ms of host time for forward and backward of a W2 layer that traces on an H200 show, and
    the 13 ms for a layer of GPT-OSS 120B on H100. The host in docs/results/host_overhead.md needs about twice as much for
    small models.
    """
    collective_start_s: float = 20e-6
    """Seconds before the first byte of a collective moves. Assumed."""

    def __post_init__(self) -> None:
        """Reject fractions out of range and negative costs."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _RATES:
                check_rate(field.name, value)
            elif field.name in _FROM_ZERO:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ConfigError(f"{field.name} {value!r} is not a number. Give one like {field.default}.")
                if not 0 <= value < math.inf:
                    raise ConfigError(f"{field.name} {value} must be finite and at least 0. Give one like {field.default}.")
            elif value is not None or field.default is not None:
                check_part(field.name, value, example=field.default or ASSUMED_MEMORY)


_FROM_ZERO = ("rerun_extra", "grouped_rows", "kernel_start_s", "host_s_per_launch", "collective_start_s")
"""Fields that may be 0 or exceed 1."""
_RATES = ("strided_bytes_per_s",)  # fields in bytes per second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Measured rates between ranks, in each direction. None defaults to the hardware's rate times its efficiency."""

    nvlink_bytes_per_s: float | None = None
    """Bytes per second from a rank to other ranks of its NVLink domain. An H800, with less NVLink than H100, has 160 GB/s."""
    network_bytes_per_s: float | None = None  # bytes per second from a rank to ranks of other domains
    nvlink_ranks: int | None = None  # ranks in an NVLink domain

    def __post_init__(self) -> None:
        """Reject impossible rates."""
        for name in ("nvlink_bytes_per_s", "network_bytes_per_s"):
            check_rate(name, getattr(self, name))
        if self.nvlink_ranks is not None:
            check_count("nvlink_ranks", self.nvlink_ranks)
