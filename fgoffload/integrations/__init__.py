"""Connects the engine to training frameworks. No other code of fgoffload imports one."""
