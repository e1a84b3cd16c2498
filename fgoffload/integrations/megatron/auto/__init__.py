"""`--offload-modules auto`: a plan for a memory budget, made while a training runs."""
