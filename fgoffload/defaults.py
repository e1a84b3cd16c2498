"""Default sizes of offload options."""

from fgoffload.units import GIB, MIB

DEFAULT_MIN_OFFLOADED_TENSOR_SIZE = 1024 * 1024
"""Elements, as in Megatron. Source: `TransformerConfig.min_offloaded_tensor_size`, megatron-core 0.16.1."""

DEFAULT_WINDOW_BYTES = 1 * GIB
"""Bytes. At 50 GB/s this is 21 ms of copies to the host, the forward time of one or two large MoE layers, and 1% of an 80 GB
GPU. So compute does not wait for a burst of copies. Source: link rates in docs/concepts/how_it_works.md."""

DEFAULT_PREFETCH_BYTES = 512 * MIB
"""Bytes. At 50 GB/s this is 11 ms of copies to the device, more than the largest group of the reference workloads needs."""
