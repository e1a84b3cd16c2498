"""Default sizes."""

from fgoffload.units import GIB, MIB

DEFAULT_MIN_OFFLOADED_TENSOR_SIZE = 1024 * 1024
"""Elements, as Megatron counts. Source: `TransformerConfig.min_offloaded_tensor_size`, megatron-core 0.16.1."""

DEFAULT_WINDOW_BYTES = 1 * GIB
"""Bytes. At 50 GB/s to the host this is 21 ms of copies, the forward of one or two large MoE layers. So compute never waits
for a burst, and the window takes 1% of an 80 GB device. Source: link rates in docs/concepts/how_it_works.md."""

DEFAULT_PREFETCH_BYTES = 512 * MIB
"""Bytes. At 50 GB/s to the device this is 11 ms ahead of backward, more than the largest group of the reference workloads."""
