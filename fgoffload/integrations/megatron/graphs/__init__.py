"""Supports offload in layers that Megatron captures in CUDA graphs."""
