"""Normalize a model with one line, train it, take the normalization out with one line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp

torch.manual_seed(0)
layers: list[nn.Module] = [nn.Linear(64, 20), nn.Sigmoid()]
for _ in range(5):
    layers += [nn.Linear(20, 20), nn.Sigmoid()]
plain = nn.Sequential(*layers, nn.Linear(20, 4))
x = torch.rand(2048, 64)
y = (x[:, :32].sum(1) > 16).long() + 2 * (x[:, 32:].sum(1) > 16).long()

for name, model in {"plain": plain, "normalized": vp.normalize(plain, vp.input_moments(x))}.items():
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    print(f"{name:<11} training accuracy {(model(x).argmax(1) == y).float().mean():.3f}")

folded = vp.fold(model)  # an ordinary nn.Sequential again
plain.load_state_dict(folded.state_dict())  # strict: every key has its place
print(f"{'folded':<11} differs by {(plain(x) - model(x)).abs().max():.1e}, is a {type(plain[0]).__name__}")
