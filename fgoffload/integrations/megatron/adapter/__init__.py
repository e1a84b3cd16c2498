"""Tracks the layers and sites of a Megatron model, and applies the plan's action to each site."""
