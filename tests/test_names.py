"""One name for one thing in all public calls: `moments` of the data, `example` of an input."""

import inspect

import pytest
import torch
from torch import nn

import varprop as vp

CALLS = {
    "normalize": lambda model, given: vp.normalize(model, **given),
    "init_": lambda model, given: vp.init_(model, **given),
    "propagate": lambda model, given: vp.propagate(model, **given),
    "capture": lambda model, given: vp.capture(model, **given),
    "inspect": lambda model, given: vp.inspect(model, **given),
    "summary": lambda model, given: vp.summary(model, **given),
    "reparametrize": lambda model, given: vp.reparametrize(model, "analytic", **given),
}


@pytest.mark.parametrize("name", CALLS)
def test_moments_and_example_are_arguments_of_these_names(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 2))
    CALLS[name](model, {"moments": vp.Moments(0.0, 1.0), "example": (1, 3, 4, 4)})


def test_nothing_public_takes_the_moments_or_an_example_by_another_name():
    for name in vp.__all__:
        public = getattr(vp, name)
        if inspect.isfunction(public):
            assert not {"input", "inputs"} & set(inspect.signature(public).parameters), name
