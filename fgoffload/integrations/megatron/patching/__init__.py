"""Imports Megatron-Core, and replaces and restores its symbols."""
