"""Finds the fastest plan within a memory budget: treatments of layers, their costs, and Megatron's nearest flags."""
