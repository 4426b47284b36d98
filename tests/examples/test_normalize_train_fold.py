"""The example prints what the README says in words, on any machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_prints_what_the_readme_says():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    example = ROOT / "examples" / "normalize_train_fold.py"
    out = subprocess.run([sys.executable, str(example)], env=env, capture_output=True, text=True, check=True).stdout
    plain, normalized, folded = out.splitlines()
    accuracy = [float(re.search(r"accuracy (\d\.\d+)", line)[1]) for line in (plain, normalized)]
    assert accuracy[0] < 0.75 and accuracy[1] > 0.95
    assert float(re.search(r"differs by (\S+),", folded)[1]) < 1e-4 and folded.endswith("is a Linear")
