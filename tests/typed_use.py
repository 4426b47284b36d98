"""A user's script, for the type checker alone (`make types`): what goes in comes out with its type.

Strict mypy refuses an ignore that nothing needs, so that each of those below is an error a user sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import torch
from torch import nn

import varprop as vp

if TYPE_CHECKING:
    import varprop_lab


class Net(nn.Module):
    """A model with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = 10


def functions_from_model_to_model(net: Net, x: torch.Tensor) -> None:
    moments = vp.input_moments(x)
    normalized = vp.normalize(net, moments)
    assert_type(normalized, Net)
    assert_type(normalized.classes, int)
    assert_type(vp.normalize(net, moments=moments, example=x), Net)
    assert_type(vp.fold(normalized), Net)
    assert_type(vp.init_(net, moments=moments), Net)
    assert_type(vp.reparametrize(net, "analytic", moments=moments), Net)
    assert_type(vp.batch_norm_start(net, x), Net)
    assert_type(vp.unit_norm_(net), Net)
    with vp.unchanged(normalized) as same:
        assert_type(same, Net)


def results(net: Net, x: torch.Tensor) -> None:
    moments = vp.input_moments(x)
    assert_type(vp.propagate(net, moments=moments)["fc"], vp.Moments)
    assert_type(vp.capture(net, x, moments=moments), vp.Program)
    assert_type(vp.inspect(net, moments=moments).errors[0].kind, str)
    assert_type(vp.summary(net, (3, 32, 32)), vp.Summary)
    assert_type(vp.summary(net, moments=moments).parameters, int)
    assert_type(vp.predict(net, x), vp.Prediction)


def what_is_imported_later(net: Net, moments: vp.Moments) -> None:
    assert_type(vp.callbacks.LayerWatcher(net, moments, to=print), vp.callbacks.LayerWatcher)
    print(vp.callbacks.LayerWotcher)  # type: ignore[attr-defined]
    print(vp.misspelt)  # type: ignore[attr-defined]
    print(varprop_lab.misspelt)  # type: ignore[attr-defined]


def names_that_are_no_arguments(net: Net, moments: vp.Moments) -> None:
    vp.normalize(net, input=moments)  # type: ignore[call-arg]
