"""Efficiency of kernels, collectives and copies against a device's peaks, for devices without a profile.

Kernels were measured on Hopper, by others and by us, as the fields say; on other devices the figures are a guess.
"""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_part, check_rate

ASSUMED_MEMORY = 0.80
"""Reached part of the device's memory bandwidth, if not measured: slightly below the 0.90 of copies within an H100. It predicts
steps of W2 on H200s correctly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Reached parts of the peaks, above 0 and at most 1, and costs of launches and recompute."""

    matmul: float = 0.66
    """Reached part of the bf16 rate in large matrix products.

    Source: a step of 28 layers of Llama 3 8B on an H200, 1375 ms, of which these are 72%: with 0.66 it is predicted 0.2% higher
    (docs/results/predictions.md), with 0.70 3.9% lower. At best, over many shapes, H100 and H200 reach 794.5
    TFLOP/s, 0.80 (Stas Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS).
    """
    grouped_matmul: float = 0.68
    """Reached part of the bf16 rate in the matrix products of experts with many rows; n rows reach n / (n + `grouped_rows`) of
    it.

    Source: on an H100 554 TFLOP/s with 16 experts of 2048 rows and 628 with 8 of 4096, by Transformer Engine 2.7's streams of
    cuBLAS (pull request 2045 of Transformer Engine): 0.56 and 0.63.
    """
    grouped_rows: float = 400.0
    """Rows of an expert at which its matrix products reach half of that. Source: the same two figures."""
    fp8_matmul: float = 0.60
    """Reached part of the fp8 rate in large matrix products, without casts of their inputs.

    Source: at best 1403 TFLOP/s on H100, 0.71 (the same table). For the shapes of layers it is assumed.
    """
    grouped_fp8_matmul: float = 0.55
    """Reached part of the fp8 rate in the matrix products of experts. Assumed."""
    attention_forward: float = 0.53
    """Reached part of the bf16 rate in forward attention, without masked operations.

    Source: on an H100, causal, 128 channels of a head, sequences of 4096: cuDNN 518 and FlashAttention-3 579 TFLOP/s, 0.52 and
    0.59 (Shah et al., FlashAttention-3, arXiv 2407.08608, figure 5). With 64 channels, or shorter sequences, it is less.
    """
    attention_backward: float = 0.48
    """Reached part of the bf16 rate in backward attention.

    Source: the same, figure 6: cuDNN 499 and FlashAttention-3 542 TFLOP/s, without a mask: 0.50 and 0.55.
    """
    memory: float | None = None
    """Reached part of the device's memory bandwidth. None takes `Hardware.memory_efficiency` if it was measured, else
    `ASSUMED_MEMORY`."""
    strided_bytes_per_s: float | None = 1.55e12
    """Most bytes a second of element-wise kernels on strided tensors, whatever the bandwidth. None for no limit.

    Source: those of W2's activation, on halves and with a factor for each row, move 1.36 to 1.76 TB/s on an H100, together
    1.53, and 1.06 times that on an H200 (traces, in docs/results/runs as `w2_h100_kernels.csv` and
    `w2_h200_kernels.csv`). On other devices a guess.
    """
    narrow_attention: float = 0.7
    """Part of these two that heads of 64 channels reach; interpolated in between. Source: the same figures of FlashAttention-3,
    with 64 channels of a head: 400 and 410 TFLOP/s."""
    nvlink: float = 0.80
    """Reached part of the rate between devices of an NVLink domain, in collectives.

    Source: all-gather 361 and reduce-scatter 363 GB/s of 450 on 8 H200, by nccl-tests (Stas Bekman, Machine Learning
    Engineering, network). All-reduce by rings: 235 of 300 on A100, 682 of 900 on B200, and 313 of 448 on MI300X (the same).
    """
    network: float = 0.90
    """Reached part of the rate of network cards.

    Source: DeepEP's first release names 43 to 58 GB/s, with cards of 50, for dispatch and combine over 16 to 64 ranks, in which
    traffic within the node counts too.
    """
    all_to_all: float = 0.75
    """Part of other collectives' rates that an all-to-all of NCCL reaches, within and across nodes. Fitted to steps of
    Qwen3-235B on 256 H100 (tests/unit/planner/timing/published_steps.json); not measured alone."""
    rerun_extra: float = 0.10
    """Extra time of a recompute, as a part of its forward.

    Source: full recompute on H200s against forward times of profiles of the same trainings: 442 ms a step for 403 ms of forward
    (28 layers of Llama 3 8B), and 451 for 404 (latent attention with experts): 0.10 and 0.12. W2, whose forward waits for the
    host, took 0.04 less. The reason was not traced.
    """
    kernel_start_s: float = 3e-6
    """Seconds from one kernel to the next on the device. Assumed."""
    host_s_per_launch: float = 25e-6
    """Host seconds for each kernel launch, which bound the time of a layer from below.

    Source: it gives the 9 ms of host time for forward and backward of a layer of W2 that traces on an H200 show, and 13 ms for
    a layer of GPT-OSS 120B on H100. On the host of docs/results/host_overhead.md small models need about twice as much.
    """
    collective_start_s: float = 20e-6
    """Seconds before the first byte of a collective moves. Assumed."""

    def __post_init__(self) -> None:
        """Refuse parts out of range and negative costs."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _RATES:
                check_rate(field.name, value)
            elif field.name in _FROM_ZERO:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ConfigError(f"{field.name} {value!r} is no number. Give one like {field.default}.")
                if not 0 <= value < math.inf:
                    raise ConfigError(f"{field.name} {value} is not from 0 on and finite. Give one like {field.default}.")
            elif value is not None or field.default is not None:
                check_part(field.name, value, example=field.default or ASSUMED_MEMORY)


_FROM_ZERO = ("rerun_extra", "grouped_rows", "kernel_start_s", "host_s_per_launch", "collective_start_s")
"""Fields that may be 0, and above 1."""
_RATES = ("strided_bytes_per_s",)  # fields in bytes a second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Measured rates between ranks, each way. None takes the hardware's, times its efficiency."""

    nvlink_bytes_per_s: float | None = None
    """Bytes a second from a rank to ranks of its domain. H800, with less NVLink than H100, has 160 GB/s."""
    network_bytes_per_s: float | None = None  # bytes a second from a rank to ranks of other domains
    nvlink_ranks: int | None = None  # ranks of a domain, which are connected by NVLink

    def __post_init__(self) -> None:
        """Refuse impossible rates."""
        for name in ("nvlink_bytes_per_s", "network_bytes_per_s"):
            check_rate(name, getattr(self, name))
        if self.nvlink_ranks is not None:
            check_count("nvlink_ranks", self.nvlink_ranks)
