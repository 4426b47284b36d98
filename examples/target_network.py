"""A target network by Polyak averaging, as in reinforcement learning: its parameters are all there is to average.

A value network learns the values of a random walk by temporal differences; what it learns from are the values of a
slowly following target. With batch norm the target needs running statistics of its own, of states that it never sees.
A normalized network has none: target <- (1 - tau) target + tau online, over parameters, and nothing else.

The scale of a normalized weight means nothing, and it grows in training. `vp.unit_norm_` gives all rows norm 1, so that
tau means the same throughout; the function stays the same.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp

STATES, DISCOUNT = 19, 0.95


@torch.no_grad()
def follow_(target: nn.Module, online: nn.Module, tau: float) -> nn.Module:
    """Move the target's parameters a part of the way to those of the online network, all at the same scale."""
    vp.unit_norm_(target), vp.unit_norm_(online)
    for own, theirs in zip(target.parameters(), online.parameters(), strict=True):
        own.lerp_(theirs, tau)
    return target


def features(state: Tensor) -> Tensor:
    """Bumps along the line."""
    centres = torch.linspace(0, STATES - 1, 8)
    return torch.exp(-0.5 * ((state[:, None].float() - centres) / 2.0).square())


def true_values() -> Tensor:
    """Of a walk that goes left or right with equal chance, and gets 1 where it leaves on the right."""
    moves = 0.5 * (torch.diag(torch.ones(STATES - 1), 1) + torch.diag(torch.ones(STATES - 1), -1))
    reward = torch.zeros(STATES)
    reward[-1] = 0.5
    return torch.linalg.solve(torch.eye(STATES) - DISCOUNT * moves, reward)


def main(steps: int = 1500, tau: float = 0.05) -> float:
    """Train; the root mean square error of the target's values."""
    torch.manual_seed(0)
    everywhere = features(torch.arange(STATES))
    plain = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    online = vp.normalize(plain, vp.input_moments(everywhere))
    target = copy.deepcopy(online)
    assert not list(target.buffers())
    optimizer = torch.optim.Adam(online.parameters(), 3e-3)
    for step in range(1, steps + 1):
        state = torch.randint(STATES, (64,))
        after = state + 2 * torch.randint(2, (64,)) - 1
        inside = (after >= 0) & (after < STATES)
        with torch.no_grad():
            later = target(features(after)).squeeze(1)
        wanted = (after == STATES).float() + DISCOUNT * inside * later
        optimizer.zero_grad()
        F.mse_loss(online(features(state)).squeeze(1), wanted).backward()
        optimizer.step()
        follow_(target, online, tau)
        if step % 500 == 0:
            print(f"step {step}  error of the target's values {error(target, everywhere):.3f}")
    return error(target, everywhere)


@torch.no_grad()
def error(model: nn.Module, everywhere: Tensor) -> float:
    return (model(everywhere).squeeze(1) - true_values()).square().mean().sqrt().item()


if __name__ == "__main__":
    main()
