"""Prevents offload copies from making Megatron's host wait longer for the device."""
