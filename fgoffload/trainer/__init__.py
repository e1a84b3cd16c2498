"""A small trainer built on released versions of Megatron-Core, for `fgoffload train`, `profile` and `bench`."""
