"""Makes the shared test code in `support` importable, makes torch deterministic, and disables Hypothesis deadlines."""

import os
import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"  # with two threads, some of torch's CPU kernels add in another order each time

# Examples have no deadline, since machines are slow at times. Pytest's timeout limits each test.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
