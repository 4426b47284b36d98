"""What is measured beside the library and the lab: each file or package says how it is called."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # whose networks and normalizations are measured
