"""Batch norm in and out: both modes, statistics, the wrapper as a module among others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.convert.networks import CALLED_ONCE, close, has_batch_norm, identical, linear_layers, network, numbers
from varprop import batch_norm_start, reparametrize


@pytest.mark.parametrize("name", CALLED_ONCE)
def test_training_mode_computes_the_same_on_that_batch(name: str) -> None:
    model, x = network(name)
    converted = reparametrize(model, "batch", batch=x).train()
    assert close(converted(x), model(x), 1e-11)


def test_a_layer_called_several_times_gets_the_statistics_of_all_calls() -> None:
    model, x = network("reused")
    outputs: list[Tensor] = []
    model.again.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    model(x)
    batch = reparametrize(model, "batch", batch=x)
    values = torch.cat(outputs) - model.again.bias
    assert close(batch.again.norm.running_mean, values.mean(0))
    assert close(batch.again.norm.running_var, values.var(0, correction=0))


def test_a_given_batch_stands_for_the_running_statistics() -> None:
    model, x = network("resnet")
    trained = copy.deepcopy(model).train()
    assert close(reparametrize(model, "standard", batch=x)(x), trained(x), 1e-10)


@pytest.mark.filterwarnings("ignore:.*no longer tied")
@pytest.mark.parametrize("name", CALLED_ONCE)
def test_the_start_is_that_of_a_batch_normalized_model(name: str) -> None:
    model, x = network(name)
    state = copy.deepcopy(model)
    plain = batch_norm_start(model, x, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    reference = reparametrize(model, "batch", batch=x).train()
    for module in [m for m in reference.modules() if has_batch_norm(m)]:
        nn.init.zeros_(module.norm.bias)
        scale = torch.rand(module.norm.num_features, generator=generator, dtype=torch.float64)
        module.norm.weight.data.copy_(scale)
    assert close(plain(x), reference(x), 1e-10)
    assert identical(model, state)
    assert type(plain) is type(model)
    assert not any(has_batch_norm(m) for m in plain.modules())


def test_the_start_gives_every_layer_mean_zero_and_a_std_below_one() -> None:
    model, x = network("residual")
    plain = batch_norm_start(model, x)
    for path, layer in linear_layers(plain).items():
        layer.register_forward_hook(lambda _m, _a, out, path=path: seen.update({path: out}))
    seen: dict[str, Tensor] = {}
    plain(x)
    for out in seen.values():
        axes = [axis for axis in range(out.ndim) if axis != 1]
        assert out.mean(axes).abs().max() < 1e-12
        assert out.std(axes).max() < 1.1


def test_the_start_of_a_model_with_batch_norms_elsewhere() -> None:
    class PreActivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b, self.unused = (
                nn.Linear(5, 6),
                nn.BatchNorm1d(6),
                nn.Linear(6, 6),
                nn.Linear(2, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return h + self.b(torch.relu(self.norm(h)))

    model, x = PreActivation().double(), numbers(16, 5)
    plain = batch_norm_start(model, x, torch.Generator().manual_seed(0)).eval()
    assert isinstance(plain.norm, nn.BatchNorm1d)
    assert torch.equal(plain.unused.weight, model.unused.weight)
    assert torch.equal(plain.unused.bias, model.unused.bias)
    assert plain(x).mean(0).abs().max() < 1e-12  # of both summands


def test_hooks_keep_their_place_and_their_handles() -> None:
    model, x = network("mlp")
    handle = model[2].register_forward_hook(lambda _m, _a, out: out.exp())
    before = model(x)
    batch = reparametrize(model, "batch", batch=x, inplace=True)
    assert close(batch(x), before)
    assert close(reparametrize(batch, "standard", inplace=True)(x), before)
    handle.remove()
    assert not close(model(x), before, 1e-3)


def test_the_wrapper_is_an_ordinary_module() -> None:
    model, x = network("conv")
    batch = reparametrize(model, "batch", batch=x)
    assert {"0.layer.weight", "0.norm.weight", "0.norm.running_var"} <= batch.state_dict().keys()
    assert "0.layer.bias" not in batch.state_dict()
    for twin in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert close(twin(x), model(x))
        assert close(reparametrize(twin, "standard")(x), model(x))
    fresh = reparametrize(network("conv")[0], "batch", batch=x + 1)
    fresh.load_state_dict(batch.state_dict())
    assert torch.equal(fresh(x), batch(x))
    assert batch[0].stride == (2, 2)
    assert close(F.conv2d(x, batch[0].weight, batch[0].bias, 2), model[0](x))
    with pytest.raises(AttributeError):
        _ = batch[0].nothing


def test_unbatched_inputs_still_work() -> None:
    model, x = network("conv")
    front = nn.Sequential(*model[:4])
    batch = reparametrize(front, "batch", batch=x)
    assert close(batch(x[0]), front(x[0]))


def test_a_transposed_output_size_is_passed_on() -> None:
    up, x = nn.ConvTranspose2d(3, 2, 3, stride=2).double().eval(), numbers(4, 3, 5, 5)
    batch = reparametrize(up, "batch", batch=x)
    assert close(batch(x, output_size=[12, 12]), up(x, output_size=[12, 12]))


class Shared(nn.Module):
    """A layer and its batch norm, called several times."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = F.relu(self.norm(self.conv(x)))
        return self.out(x)


class Branch(nn.Module):
    """A batch norm that no layer can do the work of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.out(F.relu(self.norm(y) + y))


@pytest.mark.parametrize("to", ("standard", "weight"))
def test_calls_with_statistics_of_their_own_are_refused(to: str) -> None:
    model, x = Shared().double().train(), 1 + 3 * numbers(8, 3, 6, 6)
    with pytest.raises(ValueError, match=r"'norm' is called 2 times .* leave `batch` out"):
        reparametrize(model, to, batch=x)
    assert close(reparametrize(model, to, example=x).eval()(x), model.eval()(x))
    once = Shared(1).double().train()
    assert close(reparametrize(once, to, batch=x).eval()(x), once(x), 1e-10)


def test_calls_on_the_same_values_are_one() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) * self.norm(self.conv(x))

    model, x = Siamese().double().train(), 1 + 3 * numbers(8, 3, 6, 6)
    assert close(reparametrize(model, "standard", batch=x).eval()(x), model(x), 1e-10)


def test_a_batch_norm_elsewhere_computes_the_same_in_training_mode() -> None:
    model, x = Branch().double(), 1 + 3 * numbers(8, 3, 6, 6)
    model(numbers(8, 3, 6, 6))
    model.eval()
    converted = reparametrize(model, "batch", batch=x)
    assert close(converted.eval()(numbers(2, 3, 6, 6)), model(numbers(2, 3, 6, 6)), 1e-10)
    assert close(converted.train()(x), model(x), 1e-10)


def test_what_training_mode_computes_otherwise_is_named() -> None:
    shared, x = Shared().double().eval(), 1 + 3 * numbers(8, 3, 6, 6)
    with pytest.warns(UserWarning, match="called several times.*'conv'"):
        converted = reparametrize(shared, "batch", batch=x)
    assert close(converted(x), shared(x), 1e-10)
    model = Branch().double().eval()
    model.norm = nn.BatchNorm2d(4, affine=False).double().eval()
    with pytest.warns(UserWarning, match="'norm' has no parameters"):
        reparametrize(model, "batch", batch=x)


@pytest.mark.parametrize("affine", (True, False))
def test_a_batch_norm_without_running_statistics_takes_those_of_the_batch(affine: bool) -> None:
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=False)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()).double().train(), numbers(8, 3, 6, 6)
    plain = reparametrize(model, "standard", batch=x)
    assert isinstance(plain[1], nn.Identity) and close(plain(x), model(x), 1e-10)
    staying = reparametrize(model, "standard", example=x)
    assert close(staying(x), model(x), 1e-10)


def test_statistics_are_those_of_what_the_operation_reads() -> None:
    class Squashed(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.tanh(input))

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), Squashed(4)).double().train(), numbers(8, 3, 6, 6)
    assert close(reparametrize(model, "standard", batch=x).eval()(x), model(x), 1e-10)


class Standardized(nn.Conv2d):
    """A layer that does not scale with its weight."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        return 2 * F.conv2d(input, rows.view_as(self.weight), self.bias)


class TwiceTheBias(nn.Conv2d):
    """The same, which a batch norm follows directly."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, 2 * self.bias)


@pytest.mark.filterwarnings("ignore:.*forward of their own")
@pytest.mark.parametrize("to", ("standard", "weight", "batch"))
@pytest.mark.parametrize("kind", (Standardized, TwiceTheBias))
def test_layers_with_a_forward_of_their_own_take_no_batch_norm(kind: type[nn.Conv2d], to: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    model(1 + 3 * numbers(8, 3, 6, 6))
    model.eval()
    x = numbers(8, 3, 6, 6)
    converted = reparametrize(model, to, example=x, batch=x if to == "batch" else None)
    assert close(converted(x), model(x), 1e-10)
    assert type(converted[1]) is nn.BatchNorm2d
    assert close(reparametrize(converted, "standard", example=x)(x), model(x), 1e-10)


def test_a_layer_with_a_forward_of_its_own_is_named() -> None:
    model = nn.Sequential(Standardized(3, 4, 3), nn.Conv2d(4, 2, 1)).double()
    for convert in (lambda x: reparametrize(model, "batch", batch=x), lambda x: batch_norm_start(model, x)):
        with pytest.warns(UserWarning, match="forward of their own and get no batch norm: '0'"):
            convert(numbers(8, 3, 6, 6))
