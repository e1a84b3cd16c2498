"""Default sizes for offload options."""

from fgoffload.units import GIB, MIB

DEFAULT_MIN_OFFLOADED_TENSOR_SIZE = 1024 * 1024
"""Megatron's default, in elements. Source: `TransformerConfig.min_offloaded_tensor_size` of megatron-core 0.16.1."""

DEFAULT_WINDOW_BYTES = 1 * GIB
"""Large enough to absorb a burst of copies: at 50 GB/s, 1 GiB takes 21 ms, about the forward time of one or two large MoE
layers. 1 GiB is about 1% of an 80 GB GPU's memory. Source: link rates in docs/concepts/how_it_works.md."""

DEFAULT_PREFETCH_BYTES = 512 * MIB
"""Larger than the tensors that any site of the reference workloads saves. At 50 GB/s, 512 MiB takes 11 ms to reload."""
