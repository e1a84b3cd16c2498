"""Plans a model's offload and recompute for a memory budget, from its own measurements."""
