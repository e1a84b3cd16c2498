"""Makes the shared test code in `support` importable, and disables Hypothesis deadlines."""

import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parent))

# Examples have no deadline, since machines are slow at times. Pytest's timeout limits each test.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
