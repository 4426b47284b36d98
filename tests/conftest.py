"""Shared set-up of the tests."""

from __future__ import annotations

import pytest
import torch

from . import chromium

torch.set_num_threads(1)  # one thread a worker: the workers share the cores


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium; `make test-browser` installs it where there is none."""
    path = chromium.find()
    if path is None:
        pytest.skip("no chromium, chromium-browser, google-chrome or chrome on the PATH")
    running = chromium.Browser(path, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
