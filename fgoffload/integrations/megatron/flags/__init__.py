"""Megatron's flags, read without Megatron: the model, the ranks and the offload that they describe."""
