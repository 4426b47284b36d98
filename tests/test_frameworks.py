"""Normalized models in the loops of others: the parameters are those of a loop by hand."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp

if importlib.util.find_spec("torchvision"):
    importlib.import_module("tests.torchvision_on_cpu")  # which they import where it is installed
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
STEPS = 4


class Classifier(nn.Module):
    """Returns its loss as models of transformers do."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@functools.cache
def start() -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    return vp.normalize(plain, vp.Moments(torch.zeros(1, 5), torch.ones(1, 5)), example=X)


def model() -> Classifier:
    return Classifier(copy.deepcopy(start()))


@functools.cache
def by_hand() -> Classifier:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trained(X, Y)["loss"].backward()
        optimizer.step()
    return trained


def assert_trained_as_by_hand(trained: nn.Module) -> None:
    own = dict(trained.named_parameters())
    for name, wanted in by_hand().named_parameters():
        assert torch.allclose(own[name], wanted, rtol=1e-5, atol=1e-6), name
    assert not torch.allclose(own["body.0.weight"], model().body[0].weight)


@pytest.mark.compatibility("Lightning, Trainer, accelerate")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="make test-frameworks installs it")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    settings = {"max_epochs": STEPS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(default_root_dir=tmp_path, enable_model_summary=False, **settings)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=len(X)))
    assert_trained_as_by_hand(module.model)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(again.model(X)["logits"], module.model(X)["logits"])


@pytest.mark.compatibility("Lightning, Trainer, accelerate")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="make test-frameworks installs it")
    pytest.importorskip("accelerate")
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=len(X),
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    trainer = transformers.Trainer(trained, arguments, train_dataset=data, optimizers=(optimizer, constant))
    trainer.train()
    assert_trained_as_by_hand(trained)
    trainer.save_model(str(tmp_path / "saved"))
    from safetensors.torch import load_file

    again = model()
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(again(X)["logits"], trained(X)["logits"])


@pytest.mark.compatibility("Lightning, Trainer, accelerate")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="make test-frameworks installs it")
    accelerator, trained = accelerate.Accelerator(cpu=True), model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=len(X))
    prepared, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    for _ in range(STEPS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(prepared(x, y)["loss"])
            optimizer.step()
    assert_trained_as_by_hand(accelerator.unwrap_model(prepared))


def test_accelerate_takes_mixed_precision_off_again() -> None:
    accelerate = pytest.importorskip("accelerate", reason="make test-frameworks installs it")
    plain, expected = model().body, model().body(X)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of tests before, which it would keep
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(plain)
    assert not torch.equal(prepared(X), expected)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(unwrapped(X), expected)
    torch.testing.assert_close(vp.fold(unwrapped).eval()(X), expected)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class FirstOutput(nn.Module):
    """A model of transformers as a function of one tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.body(x)[0]
        return first


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ViT": {"image_size": 8, "patch_size": 4, **SMALL},
    "DeiT": {"image_size": 8, "patch_size": 4, **SMALL},
    "Llama": {"vocab_size": 11, "num_key_value_heads": 2, "use_cache": False, **SMALL},
    "Bert": {"vocab_size": 11, **SMALL},
    "GPT2LMHead": {
        "vocab_size": 11,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "T5Encoder": {"vocab_size": 11, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    """Random ones are normalized, keep their function, are folded, and train."""
    transformers = pytest.importorskip("transformers", reason="make test-frameworks installs it")
    torch.manual_seed(0)
    family = name.removesuffix("Encoder").removesuffix("LMHead")
    config = getattr(transformers, f"{family}Config")(**TRANSFORMERS[name])
    plain = FirstOutput(getattr(transformers, f"{name}Model")(config)).eval()
    images = "image_size" in TRANSFORMERS[name]
    x = torch.randn(2, 3, 8, 8) if images else torch.randint(11, (2, 6))
    data = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)) if images else vp.Tokens.uniform(11)
    with torch.no_grad():
        same = vp.normalize(plain, data, example=x, init="preserve")
        torch.testing.assert_close(same(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(vp.fold(same)(x), plain(x), rtol=1e-4, atol=1e-4)
        normalized = vp.normalize(plain, data, example=x)
        assert not torch.allclose(normalized(x), plain(x), atol=1e-2)
        torch.testing.assert_close(vp.fold(normalized)(x), normalized(x), rtol=1e-5, atol=1e-5)
    target = torch.randn(normalized(x).shape)
    optimizer = torch.optim.Adam(normalized.parameters(), 1e-3)
    before = F.mse_loss(normalized(x), target)
    before.backward()
    used = [layer for layer in normalized.modules() if hasattr(layer, "scale") and layer.scale.grad is not None]
    assert len(used) >= 2 * 4 and all(bool(layer.weight.grad.any()) for layer in used)
    optimizer.step()
    assert F.mse_loss(normalized(x), target) < before


MOMENTS = vp.Moments(torch.zeros(1, 5), torch.ones(1, 5))


def written(values: Any) -> None:
    """What a watcher wrote in two measurements of the layers 0, 2 and so on."""
    assert [step for _, step in values] == [0, 2]
    for found, _ in values:
        measured = {name for name in found if name.endswith("/measured")}
        assert len(measured) >= 5 and all(found[name.replace("measured", "predicted")] > 0 for name in measured)


def test_callbacks_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="make test-frameworks installs it")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = self.model(*batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    values: list[Any] = []
    select = lambda module: module.model.body  # noqa: E731
    watcher = vp.callbacks.lightning_watcher(
        MOMENTS, X[:1], lambda found, step: values.append((found, step)), 2, select
    )
    finder = vp.callbacks.lightning_lr_finder(steps=1, maxiter=3, plot=tmp_path / "lr.png")
    settings = {"max_epochs": STEPS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, enable_model_summary=False, callbacks=[finder, watcher], **settings
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=len(X)))
    written(values)
    assert trainer.optimizers[0].param_groups[0]["lr"] == finder.found.lr and (tmp_path / "lr.png").is_file()


def test_callbacks_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="make test-frameworks installs it")
    pytest.importorskip("accelerate")
    values: list[Any] = []
    watcher = vp.callbacks.transformers_watcher(
        MOMENTS, X[:1], lambda found, step: values.append((found, step)), 2, lambda trained: trained.body
    )
    finder = vp.callbacks.transformers_lr_finder(steps=1, maxiter=3, plot=tmp_path / "lr.png")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=len(X),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        lr_scheduler_type="constant",
    )
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    trainer = transformers.Trainer(model(), arguments, train_dataset=data, callbacks=[finder, watcher])
    trainer.train()
    written(values)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(finder.found.lr)
    assert (tmp_path / "lr.png").is_file()
