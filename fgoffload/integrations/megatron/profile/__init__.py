"""Measures a step of a Megatron training run for the planner."""
