"""The normalization of public models against the models themselves, and that the comparison notices what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.zoo import normalized
from benchmarks.zoo.inputs import Normal
from benchmarks.zoo.normalized import DIFFERENCES, compare, default_dtype, said, study, unlike_new_
from torch import Tensor, nn

import varprop as vp

INPUTS = (Normal((1, 3, 8, 8)),)
# One of each family that is small enough; `make zoo` takes all.
PUBLIC = {
    "basic": "nn_lstm nn_gru nn_transformer_encoder nn_transformer paper_mnist_mlp paper_cifar_cnn",
    "torchvision": "squeezenet1_1 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 resnet18 regnet_x_400mf "
    "regnet_y_400mf",
    "timm": "mobilenetv3_small_050 lcnetv2_small resnet18 resnetv2_18 skresnet18 selecsls42 fasternet_t0 starnet_s1 "
    "deit_tiny_patch16_224 vit_tiny_patch16_224 pit_ti_224 eva02_tiny_patch14_224 hgnet_tiny",
    "hf": "bert roberta distilbert albert electra deberta_v2 modernbert bloom llama mistral qwen2 gemma2 t5 vit",
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 5)]
    return unlike_new_(nn.Sequential(*layers).eval())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_network_is_the_same_in_all_forms(dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        record = compare(network(), INPUTS)
    assert record["status"] == "done" and record["dtype"] == str(dtype).removeprefix("torch.")
    assert all(0 <= record[key] <= record["tolerance"] for key in DIFFERENCES) and record["step"] == ""


@pytest.mark.zoo
@pytest.mark.parametrize("name", [f"{group}/{name}" for group, names in PUBLIC.items() for name in names.split()])
def test_public_models_are_the_same_in_all_forms(name: str) -> None:
    (record,) = study(name)
    assert record["status"] == "done", said(record) + record.get("error", "")


def test_parameters_and_statistics_are_unlike_new_ones() -> None:
    tensors = [*network().parameters(), network()[1].running_mean, network()[1].running_var]
    assert all(bool(x.min() != x.max()) for x in tensors)


@pytest.mark.parametrize("wrong", ["normalize", "fold"])
def test_a_lost_activation_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(vp, wrong)

    def without_activation(*arguments: Any, **more: Any) -> nn.Module:
        result = original(*arguments, **more)
        result[2].forward = lambda x: x
        return result

    monkeypatch.setattr(vp, wrong, without_activation)
    with default_dtype(torch.float64):
        record = compare(network(), INPUTS)
    assert record["status"] == "differs"
    assert record["preserve" if wrong == "normalize" else "fold"] > 0.01


def test_a_parameter_that_loses_its_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vp.normalize

    def frozen(*arguments: Any, **more: Any) -> nn.Module:
        result = original(*arguments, **more)
        result[5].weight.requires_grad_(False)
        return result

    monkeypatch.setattr(vp, "normalize", frozen)
    record = compare(network(), INPUTS)
    assert record["status"] == "differs" and record["step"] == "Without a gradient now: 5.weight."


class Offset(nn.Module):
    """A number that is added to all that a layer reads: behind a normalization by the mean it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.number = nn.Linear(3, 6), nn.Linear(6, 2), nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.first(x)) + self.number)
        return y


def test_a_parameter_that_no_longer_counts_needs_no_gradient() -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        plain, batch = Offset(), (torch.randn(4, 3),)
        model = vp.normalize(plain, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
        loss, _ = normalized.gradients(model, batch)
        counted = {name: normalized._counts(model, p, batch, loss) for name, p in model.named_parameters()}
    assert counted.pop("number") is False and all(counted.values())


def test_a_refusal_keeps_its_sentence_and_a_crash_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    record = compare(nn.ReLU().eval(), INPUTS)
    assert record["status"] == "ValueError" and "no linear layer" in record["error"]

    def crashes(*_: Any, **__: Any) -> nn.Module:
        raise KeyError("p_weight")

    monkeypatch.setattr(vp, "normalize", crashes)
    with pytest.raises(KeyError):
        compare(network(), INPUTS)


def test_single_precision_written_into_a_model_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    monkeypatch.setattr(normalized, "build", lambda _: (Single(*network()).eval(), INPUTS))
    (record,) = study("own/single")
    assert record["status"] == "done" and record["dtype"] == "float32"
    assert torch.get_default_dtype() == torch.float32
