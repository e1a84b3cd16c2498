"""Plans offload and recompute of a model for a memory budget, from measurements of the model."""
