"""Connects the engine to training frameworks. No other part of fgoffload imports a framework."""
