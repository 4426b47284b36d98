"""torchvision beside a CPU build of torch: its binary operators need a declaration before the import."""

from __future__ import annotations

import contextlib

import torch

with contextlib.suppress(RuntimeError):  # a CUDA build declares them itself
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision

__all__ = ["torchvision"]
