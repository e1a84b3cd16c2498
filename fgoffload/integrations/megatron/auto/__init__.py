"""`--offload-modules auto`: makes a plan for a memory budget during a training run."""
