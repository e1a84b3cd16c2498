"""CUDA graphs of Megatron, with offload in captured layers."""
