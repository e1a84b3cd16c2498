"""Makes `support`, the shared test code, importable, and sets no deadline for examples."""

import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parent))

# Of one example; machines are slow at times. Each test has pytest's timeout.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
