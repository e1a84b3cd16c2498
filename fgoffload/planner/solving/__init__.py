"""Finds the fastest plan within a memory budget, and the fastest setting of Megatron's own flags to compare it with."""
