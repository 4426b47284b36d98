"""How small the overhead has to be, and whether it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .record import Record


@dataclass(frozen=True)
class Target:
    """The largest ratio of the analytic normalization to another variant in the same run.

    Attributes:
        quantity: ``time`` or ``memory``.
        base: The other variant.
    """

    device: str
    case: str
    mode: str
    limit: float
    quantity: str = "time"
    base: str = "none"


TARGETS = (
    Target("cuda", "cifar", "captured", 1.03),
    Target("cuda", "cifar", "eager", 1.15),
    Target("cuda", "resnet50", "compiled", 1.03),
    Target("cuda", "resnet50", "compiled", 1.03, "memory"),
    Target("cuda", "resnet50", "eager", 1.08),
    Target("cpu", "cifar", "eager", 1.06),
    Target("cpu", "mlp", "eager", 1.60),
    Target("cpu", "mlp", "eager", 1.00, base="batch"),
)
FOLDED = 1.00
FOLD = 2.00  # times what its bytes take at the speed of a copy, on a GPU


def judge(record: Record, device: str) -> list[dict[str, Any]]:
    """Every target of the device with what was measured; values are compared as they are printed, at two decimals."""
    ratios: list[tuple[str, float | None, float]] = []
    for target in TARGETS:
        if target.device == device:
            cell = record.cell(target.case, target.mode, "analytic")
            ratio_of = record.time_ratio if target.quantity == "time" else record.memory_ratio
            text = f"{target.case} {target.mode}, {target.quantity} to {target.base}"
            ratios.append((text, ratio_of(cell, target.base) if cell else None, target.limit))
    for inference in record.inferences:
        name = f"{inference.case} folded inference"
        ratios.append((f"{name}, time to the plain model", inference.ratio, FOLDED))
        ratios.append((f"{name}, bits differ (1) or not (0)", 0.0 if inference.identical else 1.0, 0.0))
    fold = record.roofline
    if fold is not None and device == "cuda":
        ratios.append(("fold alone, forward, time to the least", fold.forward / fold.least_forward, FOLD))
        ratios.append(("fold alone, backward, time to the least", fold.backward / fold.least_backward, FOLD))
    return [
        {"target": text, "limit": limit, "measured": measured, "verdict": _verdict(measured, limit)}
        for text, measured, limit in ratios
    ]


def _verdict(measured: float | None, limit: float) -> str:
    return "not measured" if measured is None else "pass" if round(measured, 2) <= limit else "miss"
