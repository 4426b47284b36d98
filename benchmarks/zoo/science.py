"""Models of monai (medical images) and PyTorch Geometric (graphs), small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .inputs import Inputs, Normal

PLANE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1}
MASK: dict[str, Any] = PLANE | {"out_channels": 2}
MONAI: dict[str, dict[str, Any]] = {
    "UNet": MASK | {"channels": (8, 16, 32), "strides": (2, 2)},
    "BasicUNet": MASK,
    "SegResNet": MASK,
    "DynUNet": MASK | {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)},
    "AttentionUnet": MASK | {"channels": (8, 16, 32), "strides": (2, 2)},
    "UNETR": MASK | {"img_size": 96},
    "SwinUNETR": MASK | {"feature_size": 12},
    "DenseNet121": MASK,
    "ViT": PLANE | {"img_size": 96, "patch_size": 16, "classification": True},
    "VNet": MASK,
}
NODES, FEATURES = 40, 32


def from_monai(name: str) -> tuple[nn.Module, Inputs]:
    """A small model in two dimensions."""
    from monai.networks import nets

    return getattr(nets, name)(**MONAI[name]), (Normal((1, 1, 96, 96)),)


class OnGraph(nn.Module):
    """A graph network on a fixed random graph with a loop at every node: the nodes' features are the only input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        start, loops = torch.randint(NODES, (4 * NODES,)), torch.arange(NODES).expand(2, -1)
        ends = (start + torch.randint(1, NODES, start.shape)) % NODES
        self.register_buffer("edges", torch.cat([torch.stack([start, ends]), loops], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x[0], self.edges)


def from_pyg(name: str) -> tuple[nn.Module, Inputs]:
    """Three layers of a kind of graph convolution."""
    from torch_geometric.nn import models

    # adding loops is a choice by value, which has no fixed graph of operations: they are there already
    more = {"add_self_loops": False} if name in ("GCN", "GAT") else {}
    model = getattr(models, name)(in_channels=FEATURES, hidden_channels=64, num_layers=3, out_channels=8, **more)
    return OnGraph(model), (Normal((1, NODES, FEATURES), channels=2),)
