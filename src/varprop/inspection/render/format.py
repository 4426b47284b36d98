"""Numbers and words as a page shows them."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from typing import Any

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"\b\d(?:\.\d+)?e[+-]\d+\b")
_CALL = re.compile(r"(@?vp\.\w+(?:\((?:[^()]|\([^()]*\))*\))?)")


def number(value: float | None) -> str:
    """Three significant digits; powers of ten where there would be many zeros."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and not 1e-3 <= float(f"{size:.3g}") < 1e4:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits}×10{str(int(power)).translate(_RAISED)}".replace("-", "−")
    text = f"{float(f'{value:.3g}'):.0f}" if size >= 1000 else f"{value:#.3g}".rstrip(".")
    return "0" if value == 0 else text.replace("-", "−")


def rough(value: float) -> str:
    """One significant digit, for errors."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= value < 1e4:
        return number(value)
    return f"{float(f'{value:.1g}'):.{max(0, -math.floor(math.log10(value)))}f}"


def percent(share: float | None) -> str:
    """A share of the whole; what is neither nothing nor all is not rounded to it."""
    if share is None or not math.isfinite(share):
        return ""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def count(value: int) -> str:
    """A large whole number in words a person says."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,}"


def sentence(text: str) -> str:
    """A sentence written for terminals as HTML: powers of ten and signs as they are printed in books."""
    return html.escape(_POWER.sub(lambda match: number(float(match.group())), text).replace("+-", "±"))


def with_code(text: str) -> str:
    """Text as HTML, calls of the library set as code."""
    return _CALL.sub(r"<code>\1</code>", html.escape(text))


def inline_json(value: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it, five digits, no NaN, infinity as a word."""
    return json.dumps(_each_float(value, _short), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def finite_json(value: Any) -> str:
    """JSON for programs; what is not finite becomes null."""
    return json.dumps(_each_float(value, lambda x: x if math.isfinite(x) else None), indent=1, allow_nan=False)


def _each_float(value: Any, change: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _each_float(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_float(item, change) for item in value]
    return change(value) if isinstance(value, float) else value


def _short(value: float) -> float | str | None:
    if math.isfinite(value):
        return float(f"{value:.5g}")
    return None if math.isnan(value) else "inf" if value > 0 else "-inf"
