"""Shared set-up of the tests."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest
import torch

from . import chromium

torch.set_num_threads(1)  # one thread a worker: the workers share the cores
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # or torch keeps every seed for when there is one, with the stack as text: 1 ms each
        device.manual_seed_all = lambda seed: None

# The same examples every time, so that a change is judged by what it does; `make fuzz` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, max_examples=50)
hypothesis.settings.register_profile("fuzz", print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_finish():
    """Look for garbage less often, and not among what is there before the first test: each time takes 0.3 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def onednn():
    """On: torch switches it off for good when it meets bfloat16 on a CPU that has none, and then rounds otherwise."""
    torch.backends.mkldnn.enabled = True


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium; `make test-browser` installs it where there is none."""
    path = chromium.find()
    if path is None:
        pytest.skip("no chromium, chromium-browser, google-chrome or chrome on the PATH")
    running = chromium.Browser(path, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
