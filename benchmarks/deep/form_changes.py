"""The forms between the paper's and the deep one, which the library does not offer: each change of the deep form alone.

For the ablation of `benchmarks.deep.alternatives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import varprop as vp
from varprop.norm import api
from varprop.norm.modes import with_calls


def normalized(model: nn.Module, moments: vp.Moments, changes: Sequence[bool]) -> nn.Module:
    """Return the model normalized with some changes: centred rows, first shift, a global average as one position."""
    centred, shifted, one_position = changes

    def by_form(program: Any, layers: Any, moments: Any, deep: bool = False) -> Any:
        return with_calls(program, layers, moments, one_position)

    with mock.patch.object(api, "with_calls", by_form):
        result = vp.normalize(model, moments, form="deep" if centred else "paper")
    if centred != shifted:
        shifts = dict(vp.normalize(model, moments, form="deep" if shifted else "paper").named_parameters())
        with torch.no_grad():
            for name, parameter in result.named_parameters():
                if name.endswith(".shift"):
                    parameter.copy_(shifts[name])
    return result
