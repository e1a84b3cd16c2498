"""What connects the engine to a training framework: the only code of fgoffload that imports one."""
