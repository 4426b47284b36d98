"""The operations of one call, found without data."""

import pytest
import torch
from torch import nn

from varprop.graph.tracing import traced_operations

X = torch.zeros(2, 3)


class Switch(nn.Module):
    """Does something else in training, by a helper that no look at its own source would show."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.change(self, self.layer(x))


def by_mode(model):
    return traced_operations(model.eval(), (X,), {}), traced_operations(model.train(), (X,), {})


@pytest.mark.parametrize(
    "change",
    [
        lambda module, x: x + 1 if module.training else x,
        lambda module, x: x * (2.0 if module.training else 1.0),
        lambda module, x: (x, x + 1)[module.training],
        lambda module, x: torch.cat([x, x * 2] if module.training else [x * 2, x]),
        lambda module, x: nn.functional.dropout(x, 0.5, module.training),
    ],
)
def test_what_depends_on_the_mode_shows(change):
    evaluation, training = by_mode(Switch(change))
    assert evaluation is not None and evaluation != training


def test_what_does_not_depend_on_the_mode_is_equal():
    evaluation, training = by_mode(nn.Sequential(Switch(lambda module, x: x.relu_() + x), nn.Linear(3, 1)))
    assert evaluation is not None and evaluation == training


def test_nothing_is_computed_or_changed():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    before, generator = [t.clone() for t in model.state_dict().values()], torch.get_rng_state()
    assert traced_operations(model.train(), (X,), {}) is not None
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_needs_data_has_no_trace():
    assert traced_operations(Switch(lambda module, x: x if x.sum() > 0 else -x), (X,), {}) is None
