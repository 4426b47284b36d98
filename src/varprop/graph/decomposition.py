"""Torch's own decomposition of an exported program, without preparing the same 500 operators anew every time.

`run_decompositions` overrides every operator that it is to leave alone and takes that back at its end, and asks the
dispatcher for their names once for each namespace: more than half of the time a small model takes to be captured. Here
what it has done to an operator is kept and done again at once. An operator that is new, or that was changed since, is
left to torch; and so are all of them if torch should one day do it in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import ExportedProgram, exported_program

OVERRIDE = "_override_composite_implicit_decomp"
MATERIALIZE = "_materialize_cpp_cia_ops"
FAKE_RULES = "op_implementations_dict"


class Overridden(NamedTuple):
    """What torch has made of an operator: its kernels before and after, for which callable, and its fake rule."""

    before: dict[Any, Any]
    callable: Any
    after: dict[Any, Any]
    fake_rule: Any


_overridden: dict[Any, Overridden] = {}


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """The program in functional form, composite operators kept; to be called by one thread at a time."""
    with contextlib.ExitStack() as stack:
        if hasattr(exported_program, OVERRIDE) and hasattr(fake_impls, FAKE_RULES):
            stack.enter_context(_replaced(exported_program, OVERRIDE, _overriding(exported_program)))
        if hasattr(utils, MATERIALIZE):
            stack.enter_context(_replaced(utils, MATERIALIZE, _once(getattr(utils, MATERIALIZE))))
        done: ExportedProgram = exported.run_decompositions({})
        return done


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    original = getattr(module, name)
    try:
        setattr(module, name, function)
        yield
    finally:
        setattr(module, name, original)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    """A function that does its work at the first call only: nobody registers operators within a decomposition."""
    waiting = [function]

    def run() -> None:
        if waiting:
            waiting.pop()()

    return run


def _overriding(module: Any) -> Any:
    """Torch's context manager, with what it did before done again from memory."""
    by_torch, fake_rules = getattr(module, OVERRIDE), getattr(fake_impls, FAKE_RULES)

    @contextlib.contextmanager
    def override(callables: dict[Any, Any]) -> Iterator[None]:
        known = {op: _overridden[op] for op, function in callables.items() if _is_known(op, function)}
        new = {op: function for op, function in callables.items() if op not in known}
        before = {op: dict(op.py_kernels) for op in new}
        try:  # from the first change on, so that an interrupt leaves nothing of it
            for op, kept in known.items():
                set_kernels(op, kept.after)
                fake_rules.setdefault(op, kept.fake_rule)
            with by_torch(new):
                for op, function in new.items():
                    _overridden[op] = Overridden(before[op], function, dict(op.py_kernels), fake_rules[op])
                yield
        finally:
            for op, kept in known.items():
                set_kernels(op, kept.before)
                fake_rules.pop(op, None)

    return override


def _is_known(op: Any, function: Any) -> bool:
    kept = _overridden.get(op)
    return kept is not None and kept.callable is function and kept.before == op.py_kernels


def set_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    """Let these be what Python does in an operator's place, by dispatch key."""
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
