"""torchvision beside a CPU build of torch: its binary operators need a declaration before the import."""

from __future__ import annotations

import contextlib

import torch

if torch.version.cuda is None:  # the binary beside a CUDA build declares them itself, and ends the process if they are
    with contextlib.suppress(RuntimeError):  # declared before
        for _name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision

__all__ = ["torchvision"]
