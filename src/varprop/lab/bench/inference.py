"""The folded model is the plain model: the same time, the same bits."""

from __future__ import annotations

import torch

import varprop as vp

from .record import Inference
from .step import BenchModel, autocast
from .timing import interleaved


def compare_inference(network: BenchModel, rounds: int, seconds: float) -> Inference:
    """Time the folded model against a plain one with the same weights, and compare what they compute."""
    case, device = network.case, network.device
    models = {"folded": vp.fold(network.model).eval(), "plain": case.network("none", device).eval()}
    models["plain"].load_state_dict(models["folded"].state_dict())
    with torch.inference_mode(), autocast(case.eager, device):
        outputs = {name: model(network.images) for name, model in models.items()}
        functions = {name: lambda model=model: model(network.images) for name, model in models.items()}
        times = interleaved(functions, rounds, seconds, device)
    identical = torch.equal(outputs["folded"], outputs["plain"])
    return Inference(case.name, case.title, case.eager, tuple(times["folded"]), tuple(times["plain"]), identical)
