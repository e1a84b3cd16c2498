"""Plans a model's offload and recompute for a memory budget, from measurements of the model."""
