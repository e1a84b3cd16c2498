"""Stands for Megatron-LM's training code, which lies beside its scripts and is no part of the wheel."""
