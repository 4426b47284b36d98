"""Every other name that torch knows an operation by leads to the rule of that operation."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.rules.registry import lookup, unregister

DEFINITIONS = Path(torch.__file__).parent / "testing/_internal"
# where torch's own list is silent
MORE = {"concat": "cat", "concatenate": "cat", "row_stack": "vstack", "negative": "neg", "fix": "trunc", "ger": "outer"}
MORE |= {
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "not_equal": "ne",
    "true_divide": "div",
}


def known_aliases() -> Iterator[tuple[str, str]]:
    """Alias and operation, as torch's own tests list them: a call such as ``OpInfo("abs", aliases=("absolute",))``."""
    yield from MORE.items()
    for file in (DEFINITIONS / "common_methods_invocations.py", *DEFINITIONS.glob("opinfo/definitions/*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                for keyword in call.keywords:
                    if keyword.arg == "aliases" and isinstance(keyword.value, (ast.Tuple, ast.List)):
                        for alias in ast.literal_eval(keyword.value):
                            yield alias, str(call.args[0].value)


def function(name: str) -> Callable[..., Any] | None:
    try:
        return functools.reduce(getattr, name.split("."), torch)
    except AttributeError:
        return None


def has_rule(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.split(".")[-1], None)
    return packet is not None and any(lookup(getattr(packet, overload)) for overload in packet.overloads())


ARGUMENTS: list[Callable[[Tensor, Tensor], tuple[Any, ...]]] = [
    lambda x, y: (x,), lambda x, y: (x, 0.5), lambda x, y: (x, 1), lambda x, y: (x, y), lambda x, y: ([x, y],),
    lambda x, y: (x, 0, 1), lambda x, y: (x[0], y[0]), lambda x, y: (x.sigmoid(),),
]  # fmt: skip


def fitting(call: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any] | None:
    """The function of two matrices that calls an operation with the first arguments it accepts."""
    for arguments in ARGUMENTS:
        try:
            if isinstance(call(*arguments(torch.rand(3, 3), torch.rand(3, 3))), Tensor):
                return lambda x, y, chosen=arguments: call(*chosen(x, y))
        except (TypeError, RuntimeError, IndexError):
            continue
    return None


class Aliases(nn.Module):
    def __init__(self, functions: list[Callable[[Tensor, Tensor], Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [function(x, y) for function in self.functions]


def test_aliases_have_the_rules_of_their_operations() -> None:
    names = dict(sorted(known_aliases()))
    del names["special.round"]  # to a number of decimals, for which there is no rule
    called = {alias: function(alias) for alias, name in names.items() if has_rule(name)}
    functions = {alias: fitting(call) for alias, call in called.items() if call is not None}
    usable = [call for call in functions.values() if call is not None]
    assert len(usable) >= 40
    assert {"multiply", "absolute", "concat", "arctan", "greater", "special.expit", "clip"} <= {
        alias for alias, call in functions.items() if call is not None
    }
    example = torch.zeros(3, 3), torch.zeros(3, 3)
    found = vp.coverage(Aliases(usable), example)
    assert not found.missing, [entry.op for entry in found.missing]


def test_an_alias_may_have_a_rule_of_its_own() -> None:
    key = torch.ops.aten.absolute
    vp.rule(key)(lambda x: vp.Moments(x.mean + 7, x.var))
    try:
        moments = vp.Moments(0.0, 1.0), vp.Moments(0.0, 1.0)
        result = vp.propagate(Aliases([lambda x, y: x.absolute() + y]), moments, ((2, 3), (2, 3)))
        assert (result.output[0].mean == 7).all()
    finally:
        unregister(key)


def test_a_transform_to_complex_numbers_says_so_in_one_sentence() -> None:
    model = Aliases([lambda x, y: torch.fft.rfft(x).real])
    with pytest.raises(vp.MissingRule, match="gives complex numbers, and moments are those of real ones"):
        vp.propagate(model, (vp.Moments(0.0, 1.0), vp.Moments(0.0, 1.0)), ((3, 3), (3, 3)))
