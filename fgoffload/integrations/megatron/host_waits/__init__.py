"""Prevents offload copies from prolonging Megatron's host-device synchronizations."""
