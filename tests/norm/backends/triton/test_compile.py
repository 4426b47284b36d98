"""The compiler takes every kernel as the interpreter does, and none of them spills registers."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

pytestmark = pytest.mark.kernels


def test_kernels_compile_for_hopper_without_spills(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.norm.backends.triton.compile_for_gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
