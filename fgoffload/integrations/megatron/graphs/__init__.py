"""CUDA graphs in Megatron."""
