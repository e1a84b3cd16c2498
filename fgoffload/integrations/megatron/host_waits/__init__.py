"""Finds where Megatron makes the host wait for the device, and keeps copies from delaying these waits."""
