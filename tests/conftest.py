"""Makes `support` importable: what tests share and pytest does not collect."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
