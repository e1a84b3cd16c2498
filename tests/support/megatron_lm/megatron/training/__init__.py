"""Replaces Megatron-LM's training code, which is in its repository but not in the wheel."""
