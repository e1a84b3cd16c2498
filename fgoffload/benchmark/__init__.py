"""Benchmarks step time and memory of this package against the alternatives, in one run.

Importing this package does not load torch, and neither do `settings`, `measurement`, `job`, `processes` and `worker`.
"""
