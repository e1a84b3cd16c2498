"""Measures a step of a Megatron training, for the planner."""
