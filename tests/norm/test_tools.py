"""Tools that go over the modules of a model, or carry it elsewhere: the same function behind them, or a refusal."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch.ao import quantization
from torch.nn.utils import fusion, parametrize, prune

import varprop as vp

pytestmark = pytest.mark.filterwarnings("ignore::varprop.PlainWarning")
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
EVERY_KIND = quantization.get_default_qconfig("x86")


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 4))
    normalized = vp.normalize(plain, vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)), example=X)
    with torch.no_grad():
        for parameter in normalized.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return normalized.eval()


def with_qconfig(model: nn.Module) -> nn.Module:
    model.qconfig = EVERY_KIND  # type: ignore[assignment]
    return model


def prepared_by_fx(model: nn.Module) -> nn.Module:
    from torch.ao.quantization.quantize_fx import prepare_fx

    return prepare_fx(model, quantization.get_default_qconfig_mapping("x86"), (X,))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "quantize_dynamic": lambda model: quantization.quantize_dynamic(model, {nn.Linear}),
    "quantize_dynamic in place": lambda model: quantization.quantize_dynamic(model, inplace=True),
    "prepare": lambda model: quantization.prepare(with_qconfig(model)),
    "prepare_qat": lambda model: quantization.prepare_qat(with_qconfig(model).train()),
    "prepare_fx": prepared_by_fx,
    "fuse_conv_bn_eval": lambda model: fusion.fuse_conv_bn_eval(model[0], nn.BatchNorm2d(8).eval()),
    "fuse_linear_bn_eval": lambda model: fusion.fuse_linear_bn_eval(model[-1], nn.BatchNorm1d(4).eval()),
}


@pytest.mark.compatibility("quantization")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_leave_layers_out_or_change_them_is_refused(name: str) -> None:
    with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError), match=r"vp\.fold\(model\)"):
        warnings.simplefilter("ignore")
        REFUSED[name](model())


@pytest.mark.compatibility("quantization")
def test_the_folded_model_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # which runs on every machine
    normalized = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = quantization.quantize_dynamic(vp.fold(copy.deepcopy(normalized)), {nn.Linear})
        assert type(quantized[-1]) is not nn.Linear
        expected = normalized(X)
        assert float((quantized(X) - expected).abs().max()) < 0.1 * float(expected.std())


def emptied(model: nn.Module) -> nn.Module:
    state = copy.deepcopy(model.state_dict())
    emptied = model.to("meta").to_empty(device="cpu")
    emptied.load_state_dict(state)
    return emptied


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


UNCHANGED: dict[str, Callable[[Any], Any]] = {
    "channels last": lambda model: nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last),
    "SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
    "shallow copy": copy.copy,
    "to_empty": emptied,
    "share_memory": lambda model: model.share_memory(),
    "save": saved,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_no_function(name: str) -> None:
    normalized = model()
    expected = normalized(X).detach()
    assert torch.allclose(UNCHANGED[name](normalized)(X), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_were_pruned_for_good_stay_zero_in_the_fold() -> None:
    normalized: Any = model()
    prune.l1_unstructured(normalized[2], "weight", 0.5)
    prune.remove(normalized[2], "weight")
    folded: Any = vp.fold(copy.deepcopy(normalized))
    assert torch.allclose(folded(X), normalized(X), rtol=1e-4, atol=1e-5)
    assert torch.equal(folded[2].weight == 0, normalized[2].weight == 0)
    assert float((folded[2].weight == 0).float().mean()) == 0.5


def test_a_shallow_copy_has_the_parameters_of_its_original() -> None:
    normalized = model()
    shallow, before = copy.copy(normalized), normalized(X)
    with torch.no_grad():
        shallow[0].shift.add_(1.0)  # type: ignore[index, union-attr, operator]
    assert torch.equal(shallow(X), normalized(X)) and not torch.allclose(normalized(X), before)


def _train_a_step(model: nn.Module, answer: Any) -> None:
    model(X).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    answer.put(model(X).detach().tolist())


@pytest.mark.slow
def test_a_spawned_process_trains_the_shared_parameters() -> None:
    """As in Hogwild training: a spawned process gets the model by pickle, and its parameters by shared memory."""
    shared, alone = model().share_memory(), model()
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_train_a_step, args=(shared, answer))
    process.start()
    told = torch.tensor(answer.get(timeout=120))
    process.join()
    alone(X).square().mean().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    expected: Tensor = alone(X)
    assert torch.allclose(told, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(shared(X), expected, rtol=1e-4, atol=1e-5)


class Exponential(nn.Module):
    """A parametrization that keeps a tensor positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.log()


@pytest.mark.parametrize("name", ("scale", "weight"))
def test_a_parametrized_scale(name: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        plain[0].weight.abs_()
    model = vp.normalize(plain, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)), init="preserve")
    with torch.no_grad():
        model[0].scale.abs_()
    x = torch.randn(4, 3)
    expected = model(x)
    parametrize.register_parametrization(model[0], name, Exponential())
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    assert bool(model[0].parametrizations[name].original.grad.any())
    folded = vp.fold(model)
    torch.testing.assert_close(folded(x), expected)
    assert type(folded[0]) is nn.Linear and list(dict(folded[0].named_parameters())) == ["weight", "bias"]
    torch.testing.assert_close(model(x), expected)  # whose class the copy shared


def test_a_forward_that_is_bound_like_a_function() -> None:
    """As accelerate does it when it takes mixed precision off a model."""
    data = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3))
    model = vp.normalize(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), data)
    x = torch.randn(4, 3)
    expected = model(x)

    def bound(model: nn.Module) -> nn.Module:
        model.forward = MethodType(model.forward, model)
        return model

    twin = copy.deepcopy(bound(model))
    with torch.no_grad():
        twin[0].shift.add_(1.0)
    folded = vp.fold(twin)
    assert "forward" not in folded.__dict__
    torch.testing.assert_close(model(x), expected)
    assert not torch.allclose(twin(x), expected)
    torch.testing.assert_close(folded(x), twin(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(twin))(x), twin(x))


def test_compiled_where_warnings_are_errors() -> None:
    data = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3))
    model, x = vp.normalize(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), data), torch.randn(4, 3)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
