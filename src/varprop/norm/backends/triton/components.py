"""The moment pass cut into independent programs.

Lanes that no step connects can be computed side by side. A *component* is a set of connected lanes (one channel
through a residual stage, say); components with the same sequence of operations form a *template* and differ only in
their lanes. A program runs one template's instructions one after the other on a block of its components, so that
nothing a program reads was written by another and a single launch does for any depth. Constants connect nothing: they
are read only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ...fold.layout import Lanes
from .opcodes import FIRST_INTEGRATED, Instruction, encode

# Components a program takes: few, since the pass waits for one operation after the other and multiprocessors are free;
# fewer still where each is a row of 32 nodes.
BLOCK, BLOCK_INTEGRATED = 64, 16
IDLE = 512  # lanes without any operation that a program takes: it only copies them
LONGEST = 4096  # operations of one component, which run one after the other


@dataclass(frozen=True)
class Template:
    """Components that run the same operations: entry [n, c] is the lane that operation n of component c touches."""

    instructions: tuple[Instruction, ...]
    first: Tensor  # int64 [operations, components], as the others
    second: Tensor
    output: Tensor
    members: tuple[Tensor, ...]  # of every component, its lanes


@dataclass(frozen=True)
class ComponentBlock:
    """A block of components of one template."""

    template: int
    first_component: int
    components: int
    lanes: Tensor


def integrated(lanes: Lanes) -> bool:
    """Whether any step is computed by quadrature."""
    return any(encode(step.function.kernel or ()).code >= FIRST_INTEGRATED for step in lanes.steps)


def labels(lanes: Lanes) -> list[int]:
    """For every lane one lane that stands for its component."""
    parent = list(range(lanes.total))
    constants = range(lanes.sources, lanes.sources + len(lanes.constant_mean))
    for step in lanes.steps:
        for index in step.inputs:
            for output, lane in enumerate(index.tolist(), step.start):
                if lane not in constants:
                    parent[_root(parent, lane)] = _root(parent, output)
    return [_root(parent, lane) for lane in range(lanes.total)]


def _root(parent: list[int], lane: int) -> int:
    while parent[lane] != lane:
        parent[lane] = parent[parent[lane]]
        lane = parent[lane]
    return lane


def longest(lanes: Lanes) -> int:
    """Most operations in one component."""
    known = lanes.total - sum(step.count for step in lanes.steps)
    return max(Counter(labels(lanes)[known:]).values(), default=0)


def templates(lanes: Lanes) -> list[Template]:
    """All components by their sequence of operations; those without any come last, as one template."""
    codes = [code for step in lanes.steps for code in [encode(step.function.kernel or ())] * step.count]
    known = lanes.total - len(codes)
    members: dict[int, list[int]] = defaultdict(list)
    for lane, root in enumerate(labels(lanes)):
        members[root].append(lane)
    alike: dict[tuple[Instruction, ...], list[list[int]]] = defaultdict(list)
    for component in members.values():
        alike[tuple(codes[lane - known] for lane in component if lane >= known)].append(component)
    none = torch.empty(0, dtype=torch.int64)
    first, second = (torch.cat([none, *(step.inputs[n].cpu() for step in lanes.steps)]) for n in (0, -1))
    parts = []
    for key in sorted(alike, key=len, reverse=True):
        outputs = [[lane for lane in component if lane >= known] for component in alike[key]]
        output = torch.tensor(outputs, dtype=torch.int64).reshape(len(outputs), len(key)).t()
        arguments = first[output - known], second[output - known]
        parts.append(Template(key, *arguments, output, tuple(torch.tensor(one) for one in alike[key])))
    return parts


def programs(parts: list[Template], block: int) -> list[ComponentBlock]:
    """Blocks of components, the longest lists of operations first."""
    result = []
    for index, part in enumerate(parts):
        size = block if part.instructions else IDLE
        for start in range(0, len(part.members), size):
            block_members = part.members[start : start + size]
            result.append(ComponentBlock(index, start, len(block_members), torch.cat(block_members)))
    return result
