"""A capture leaves other threads and what hooks keep alone, or says so."""

import threading

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.graph.observers import HookWarning


class TrainsElsewhere(nn.Module):
    """While it is captured, another thread trains a batch norm."""

    def __init__(self, other):
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(3), other

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.other[0](torch.ones(4, 3)))
        thread.start()
        thread.join()
        return self.norm(x)


def test_a_batch_norm_that_another_thread_trains_keeps_its_statistics_current():
    other = nn.BatchNorm1d(3)
    vp.capture(TrainsElsewhere((other,)), torch.zeros(1, 3))
    assert int(other.num_batches_tracked) > 0
    torch.testing.assert_close(other.running_mean, torch.full((3,), 1 - 0.9 ** int(other.num_batches_tracked)))


def test_a_hook_that_needs_values_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def prints(module, inputs, output):
        print(float(output.sum()))

    model[0].register_forward_hook(prints)
    with pytest.raises(vp.CaptureError, match=r"prints \(.*test_capture\.py:\d+\), registered on '0', is a hook"):
        vp.capture(model, (1, 3))


def test_a_hook_that_changes_the_output_belongs_to_the_model():
    model = nn.Sequential(nn.Linear(3, 4))
    plain = vp.propagate(model, vp.Moments(0.0, 1.0), example=(1, 3)).output
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = vp.propagate(model, vp.Moments(0.0, 1.0), example=(1, 3)).output
    assert torch.allclose(hooked.var, 4 * plain.var)


def test_a_hook_that_only_looks_is_named_and_stays():
    model, kept = nn.Sequential(nn.Linear(3, 4)), []

    def keeps(module, inputs, output):
        kept.append(output)

    model[0].register_forward_hook(keeps)
    with pytest.warns(HookWarning, match="must not keep any: keeps on '0'"):
        vp.capture(model, (1, 3))
    assert list(model[0]._forward_hooks.values()) == [keeps]
    kept.clear()
    assert torch.equal(model(torch.ones(1, 3)), kept[0])


def test_hooks_of_the_model_and_of_torch_are_not_named(recwarn):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    vp.capture(model, (1, 3))
    assert not [warning for warning in recwarn if issubclass(warning.category, HookWarning)]


class ActorCritic(nn.Module):
    """Draws no action itself, but lets a distribution have the mean and the deviation."""

    def __init__(self):
        super().__init__()
        self.mean, self.value, self.deviation = nn.Linear(4, 2), nn.Linear(4, 1), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), self.deviation.exp()).mean, self.value(x)


def test_distributions_do_not_look_at_values_while_a_model_is_captured():
    model = ActorCritic()
    assert vp.propagate(model, vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))).output[0].mean.shape == (1, 2)
    with pytest.raises(ValueError, match="scale"):  # but they do again afterwards
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))
