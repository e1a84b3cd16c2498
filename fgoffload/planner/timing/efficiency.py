"""Efficiency of kernels, collectives and copies against a device's peaks, where nobody has measured.

Kernels were measured on Hopper, by others and by us, as the fields say; on other devices they are a guess. A profile replaces
them.
"""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_part, check_rate

ASSUMED_MEMORY = 0.80
"""Of the bandwidth of device memory, on devices where it was not measured: a little less than the 0.90 that copies within an
H100 reach. Steps of W2 on H200s are predicted right with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Parts of the peaks, above 0 and at most 1, and what a launch and running again cost beside."""

    matmul: float = 0.66
    """Of the bf16 rate, in large matrix products.

    Source: a step of 28 layers of Llama 3 8B on an H200, 1375 ms, of which these are 72%: with 0.66 it is predicted 0.2% higher
    (docs/results/predictions.md), with 0.70 3.9% lower. At best, over many shapes, H100 and H200 reach 794.5
    TFLOP/s, 0.80 (Stas Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS).
    """
    grouped_matmul: float = 0.68
    """Of the bf16 rate, in the matrix products of experts that each have many rows: of n, n / (n + `grouped_rows`) of it.

    Source: on an H100 554 TFLOP/s with 16 experts of 2048 rows and 628 with 8 of 4096, by Transformer Engine 2.7's streams of
    cuBLAS (pull request 2045 of Transformer Engine): 0.56 and 0.63.
    """
    grouped_rows: float = 400.0
    """Rows of an expert with which its matrix products reach half of that. Source: the same two figures."""
    fp8_matmul: float = 0.60
    """Of the fp8 rate, in large matrix products, without what it takes to have their inputs in fp8.

    Source: at best 1403 TFLOP/s on H100, 0.71 (the same table). That of a layer's shapes is assumed.
    """
    grouped_fp8_matmul: float = 0.55
    """The same, in the matrix products of experts. Assumed."""
    attention_forward: float = 0.53
    """Of the bf16 rate, counted without what the causal mask leaves out.

    Source: on an H100, causal, 128 channels of a head, sequences of 4096: cuDNN 518 and FlashAttention-3 579 TFLOP/s, 0.52 and
    0.59 (Shah et al., FlashAttention-3, arXiv 2407.08608, figure 5). With 64 channels, or shorter sequences, it is less.
    """
    attention_backward: float = 0.48
    """The same, of backward.

    Source: the same, figure 6: cuDNN 499 and FlashAttention-3 542 TFLOP/s, without a mask: 0.50 and 0.55.
    """
    memory: float | None = None
    """Of the bandwidth of device memory. None is what was measured of the device (`Hardware.memory_efficiency`), and else
    `ASSUMED_MEMORY`."""
    strided_bytes_per_s: float | None = 1.55e12
    """Most bytes a second of element-wise kernels on strided tensors, whatever the bandwidth. None is no limit.

    Source: those of W2's activation, on halves and with a factor for each row, move 1.36 to 1.76 TB/s on an H100, together
    1.53, and 1.06 times that on an H200 (traces, in docs/results/runs as `w2_h100_kernels.csv` and
    `w2_h200_kernels.csv`). On other devices a guess.
    """
    narrow_attention: float = 0.7
    """Of these two with heads of 64 channels; in between by proportion. Source: the same figures of FlashAttention-3, with 64
    channels of a head: 400 and 410 TFLOP/s."""
    nvlink: float = 0.80
    """Of the rate between devices of a domain, in collectives.

    Source: all-gather 361 and reduce-scatter 363 GB/s of 450 on 8 H200, by nccl-tests (Stas Bekman, Machine Learning
    Engineering, network). All-reduce by rings: 235 of 300 on A100, 682 of 900 on B200, and 313 of 448 on MI300X (the same).
    """
    network: float = 0.90
    """Of the rate of network cards.

    Source: DeepEP's first release names 43 to 58 GB/s, with cards of 50, for dispatch and combine over 16 to 64 ranks, in which
    traffic within the node counts too.
    """
    all_to_all: float = 0.75
    """Of what other collectives reach, in an all-to-all of NCCL, in a node and across nodes. Taken from steps of Qwen3-235B on
    256 H100 (tests/unit/planner/timing/published_steps.json); nobody measured it alone."""
    rerun_extra: float = 0.10
    """By which part of its forward what runs again takes longer than that.

    Source: full recompute on H200s beside what profiles of the same trainings measured of forward, 442 ms more a step where
    forward takes 403 (28 layers of Llama 3 8B), and 451 where it takes 404 (latent attention with experts): 0.10 and 0.12. W2,
    whose forward waits for the host, took 0.04 less. Why it is so was not traced.
    """
    kernel_start_s: float = 3e-6
    """Seconds from one kernel to the next on the device. Assumed."""
    host_s_per_launch: float = 25e-6
    """Seconds that the host needs for each kernel. A layer that launches more than the device runs in that time takes that.

    Source: with it forward and backward of a layer of W2 take the host the 9 ms that traces on an H200 show, and 13 ms one of
    GPT-OSS 120B on H100. On the host of docs/results/host_overhead.md small models need about twice as much.
    """
    collective_start_s: float = 20e-6
    """Seconds before the bytes of a collective move. Assumed."""

    def __post_init__(self) -> None:
        """Refuse parts that are none, and costs below 0.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
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
_RATES = ("strided_bytes_per_s",)
"""Fields in bytes a second."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How fast ranks were measured to send to each other, each way. None is what the hardware has, in the part they reach."""

    nvlink_bytes_per_s: float | None = None
    """Of a rank, to ranks of its domain. H800, with less NVLink than H100, has 160 GB/s."""
    network_bytes_per_s: float | None = None
    """Of a rank, to ranks of other domains."""
    nvlink_ranks: int | None = None
    """Ranks of a domain, which reach each other at the rate of NVLink."""

    def __post_init__(self) -> None:
        """Refuse what is no rate.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        for name in ("nvlink_bytes_per_s", "network_bytes_per_s"):
            check_rate(name, getattr(self, name))
        if self.nvlink_ranks is not None:
            check_count("nvlink_ranks", self.nvlink_ranks)
