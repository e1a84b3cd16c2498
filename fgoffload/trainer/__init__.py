"""A small training on the released Megatron-Core, for `fgoffload train`, `profile` and `bench`."""
