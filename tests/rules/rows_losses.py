"""Test rows for `varprop.rules.losses`."""

from __future__ import annotations

from typing import Any

import torch

from .case import Case, normal, weight

aten = torch.ops.aten
EACH, MEAN, SUM = 0, 1, 2


def against(op: Any, *settings: Any) -> list[Case]:
    """A constant target, a random one, and the elements one by one."""
    return [
        Case(op, lambda: (normal(3, 4), weight(3, 4), MEAN, *settings)),
        Case(op, lambda: (normal(3, 4), normal(3, 4), SUM, *settings), label="random"),
        Case(op, lambda: (normal(3, 4), weight(3, 4), EACH, *settings), label="each"),
    ]


def chance(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def classes(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def soft() -> torch.Tensor:
    return torch.softmax(weight(3, 4), 1)


rows = [
    *against(aten.mse_loss.default),
    *against(aten.l1_loss.default),
    *against(aten.smooth_l1_loss.default, 0.5),
    *against(aten.huber_loss.default, 0.5),
    Case(aten.soft_margin_loss.default, lambda: (normal(3, 4), weight(3, 4).sign())),
    Case(aten.binary_cross_entropy_with_logits.default, lambda: (normal(3, 4), chance(3, 4))),
    Case(
        aten.binary_cross_entropy_with_logits.default,
        lambda: (normal(3, 4), chance(3, 4), chance(4), 1 + chance(4), EACH),
        label="weighted",
    ),
    Case(aten.kl_div.default, lambda: (normal(3, 4), chance(3, 4))),
    Case(aten.kl_div.default, lambda: (normal(3, 4), -chance(3, 4), SUM), {"log_target": True}, label="log"),
    Case(aten.nll_loss_nd.default, lambda: (normal(3, 4), classes(0, 3, 1))),
    Case(aten.nll_loss_nd.default, lambda: (normal(3, 4), classes(0, 3, 1), chance(4), MEAN, 3), label="weighted"),
    Case(aten.nll_loss.default, lambda: (normal(3, 4), classes(0, 3, 1), None, EACH)),
    Case(aten.nll_loss2d.default, lambda: (normal(2, 3, 1, 2), torch.tensor([[[0, 2]], [[1, 1]]]), None, SUM)),
    Case(aten.cross_entropy_loss.default, lambda: (normal(3, 4), classes(0, 3, 1))),
    Case(aten.cross_entropy_loss.default, lambda: (normal(4), torch.tensor(2)), label="one"),
    Case(
        aten.cross_entropy_loss.default,
        lambda: (normal(3, 4, 2), torch.tensor([[0, 1], [3, 3], [2, 0]]), chance(4), MEAN, 3, 0.1),
        label="weighted",
    ),
    Case(aten.cross_entropy_loss.default, lambda: (normal(3, 4), soft(), None, EACH, -100, 0.2), label="soft"),
    Case(aten.cross_entropy_loss.default, lambda: (normal(3, 4), soft(), chance(4)), label="soft-weighted"),
]
