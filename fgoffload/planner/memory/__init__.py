"""Bytes of a device: what layers save for backward, what is there while they run, and what is there all the time."""
