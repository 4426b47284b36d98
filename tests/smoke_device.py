"""A quick look on a machine without pytest: `PYTHONPATH=src:. python tests/smoke_device.py [cuda]`."""

from __future__ import annotations

import copy
import sys
import time

import torch
from torch import nn

import varprop as vp
from tests.models import GPT, LSTMClassifier, ResNet, UNet, ViT, trained_looking

device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
print(f"torch {torch.__version__} on {device}")


def standard(*shape: int) -> vp.Moments:
    return vp.Moments(torch.zeros(shape, device=device), torch.ones(shape, device=device))


def propagates(name: str, model: nn.Module, given: object, example: torch.Tensor) -> None:
    """Propagation agrees with the CPU."""
    model = model.eval()
    start = time.perf_counter()
    result = vp.propagate(model.to(device), given, example.to(device))
    took = time.perf_counter() - start
    host = vp.propagate(copy.deepcopy(model).cpu(), to_cpu(given), example.cpu())
    error = (result.output.std.cpu() / host.output.std - 1).abs().max().item()
    assert error < 1e-3, (name, error)
    print(f"{name:<10} propagates in {took:5.2f} s, std agrees with the CPU to {error:.1e}")


def to_cpu(given: object) -> object:
    return given.to("cpu") if isinstance(given, vp.Moments) else given


def normalizes(model: nn.Module, given: vp.Moments, x: torch.Tensor) -> None:
    """Normalize, a step, fold."""
    model = model.to(device).eval()
    normal = vp.normalize(model, given, example=x[:1], init="preserve")
    error = (normal(x) - model(x)).abs().max().item() / model(x).abs().max().item()
    normal.train()
    optimizer = torch.optim.SGD(normal.parameters(), 1e-3)
    with torch.autocast(device.type, torch.bfloat16):
        normal(x).square().mean().backward()
    optimizer.step()
    plain = vp.fold(normal)
    folded = (plain.eval()(x) - normal.eval()(x)).abs().max().item() / model(x).abs().max().item()
    print(f"normalize preserves to {error:.1e}, folds to {folded:.1e}")
    assert error < 1e-4 and folded < 1e-4


torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
propagates("resnet", trained_looking(ResNet(16)), standard(1, 3, 1, 1), torch.zeros(1, 3, 64, 64))
propagates("unet", UNet(), standard(1, 3, 16, 16), torch.zeros(1, 3, 16, 16))
propagates("vit", ViT(), standard(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
propagates("lstm", LSTMClassifier(), standard(1, 6, 8), torch.zeros(1, 6, 8))
propagates("gpt", GPT(), vp.Tokens.uniform(50), torch.zeros(1, 12, dtype=torch.long))
normalizes(trained_looking(ResNet(16)), standard(1, 3, 1, 1), torch.randn(8, 3, 64, 64, device=device) + 0.5)
