"""Seconds, and what else a device says: from the peaks of its kind, or from a profile that was measured."""
