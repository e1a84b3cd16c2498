"""A small trainer on released versions of Megatron-Core, for `fgoffload train`, `profile` and `bench`."""
