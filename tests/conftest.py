"""Shared set-up of the tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # one thread a worker: the workers share the cores
