"""Finds where Megatron's host waits for the device, and keeps copies from delaying it."""
