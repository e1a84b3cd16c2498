"""Recomputes parts of a Megatron layer in backward, as a plan specifies."""
