"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before triton is imported."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED and importlib.util.find_spec("triton") is not None:
    from .interpreting import repair

    repair()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture(scope="package", autouse=True)
def unwritten_is_nan():
    """Fills every new buffer with NaN, so that a place no kernel wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
