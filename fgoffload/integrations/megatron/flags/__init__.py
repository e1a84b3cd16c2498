"""Reads Megatron's flags without Megatron: model, ranks and offload settings."""
