"""Compares step time and memory of this package with those of its alternatives, in one run.

This file and the modules `settings`, `measurement`, `job`, `processes` and `worker` do not import torch.
"""
