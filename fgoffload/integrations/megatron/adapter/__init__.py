"""Follows a Megatron model's layers and their sites, and applies a plan's action to each."""
