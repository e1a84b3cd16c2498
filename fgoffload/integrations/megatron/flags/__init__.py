"""Reads the model, the ranks and the offload settings from Megatron's flags, without importing Megatron."""
