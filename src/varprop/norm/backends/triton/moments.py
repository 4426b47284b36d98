"""The moment pass by kernels: channels cut into independent programs, their tables on the device, and the launches.

Channels that no function connects can be computed side by side. A *component* is a set of connected channels (one
channel through a residual stage, say); components with the same sequence of operations form a *template* and differ
only in their channels. A program runs one template's instructions one after the other on a block of its components, so
that nothing a program reads was written by another, and a single launch does for any depth. Constants connect nothing:
they are only read.

A function that the kernel does not compute is evaluated by torch, between two launches: what it reads is computed by
the launch before, what follows from it by the launch after. Its derivatives are saved like all others, so that the
backward, which evaluates no function, is one launch for any network.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....gaussian.derivatives import SINGLE
from ....gaussian.normal import Pair, gauss_legendre
from ...fold.layout import Channels, Function, Layout
from ..torch import SavedSizes, with_slopes
from . import moment_kernels
from .device import allocated_to_stay, flat, on_device, refuse_capture
from .functions import BENDS, FIRST_INTEGRATED, OPERATIONS, PANELS, Instruction, encode

# Components a program takes: few, since the pass waits for one operation after the other and multiprocessors are free;
# fewer still where each is a row of 32 nodes.
BLOCK, BLOCK_INTEGRATED = 64, 16
IDLE = 512  # channels without any operation that a program takes: it only copies them
LONGEST = 4096  # operations of one component, which run one after the other
SLOPES = 8  # derivatives saved of every computed channel: of mean and variance, by those of two arguments
ENTRIES = 1024  # entering channels a program writes at a time
_FAR = 1e30  # beyond any window of the quadrature
# Entries that a program adds at a time, in all and of one channel at most; channels at least.
_GATHERED, _MOST_ENTRIES, _LEAST_CHANNELS = 512, 8, 128


class TritonMoments:
    """The moment pass, in float32."""

    def __init__(self, channels: Channels, device: torch.device) -> None:
        refuse_capture("built")
        self.channels, self.device = channels, device
        self.tables: MomentTables = allocated_to_stay(device, lambda: build_tables(channels, device))
        self.replayable = not any(self.tables.by_torch)  # torch may copy from the host, which a CUDA graph cannot
        self._no_external = (torch.empty(0, device=device),) * 2

    def forward(self, shift_scale: Tensor, external: Pair | None, backward: bool) -> tuple[Tensor, list[Tensor]]:
        """See `MomentPass`; derivatives cost the kernel nothing and are always there."""
        t, channels = self.tables, self.channels
        work = torch.empty(2, t.computed, dtype=torch.float64, device=self.device)
        slopes = torch.empty(SLOPES * t.computed, dtype=torch.float64, device=self.device)
        entering = torch.empty(2, len(channels.entering), dtype=torch.float32, device=self.device)
        shift, scale, *more = (flat(x) for x in (*shift_scale.unbind(0), *(external or self._no_external)))
        for phase, programs in enumerate(t.phases):
            if phase:
                self._evaluate(t.by_torch[phase - 1], [shift, scale, *more], work, slopes.view(SLOPES, -1))
            if len(programs) == 0:
                continue
            with on_device(self.device):
                moment_kernels.forward[(len(programs),)](
                    programs, t.operations, t.numbers, t.first, t.second, t.output, t.entry, t.entry_channel,
                    t.nodes, t.knots, shift, scale, t.constant_mean, t.constant_var, *more, work[0], work[1], slopes,
                    entering[0], entering[1], channels.sources, len(t.constant_mean), channels.external, t.computed,
                    OPS=t.forward_codes, BLOCK=t.block, ENTRIES=ENTRIES, num_warps=4,
                )  # fmt: skip
        return entering, [slopes]

    def _evaluate(self, steps: Sequence[TorchStep], vectors: list[Tensor], work: Tensor, slopes: Tensor) -> None:
        """Write moments and derivatives of some computed channels by torch, from those that are computed already."""
        shift, scale, external_mean, external_var = (vector.double() for vector in vectors)
        mean = torch.cat([shift, self.tables.constant_mean, external_mean, work[0]])
        var = torch.cat([scale.square(), self.tables.constant_var, external_var, work[1]])
        for step in steps:
            arguments = [(mean[index], var[index]) for index in step.inputs]
            work[:, step.results], derivatives = with_slopes(step.function, SINGLE)(*arguments)
            for n, by_argument in enumerate(derivatives):
                slopes[4 * n : 4 * n + 4, step.results] = by_argument

    def backward(
        self, shift_scale: Tensor, saved: Sequence[Tensor], by_entering: Tensor, direct: Pair
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `MomentPass`."""
        t, channels = self.tables, self.channels
        grads = torch.empty(2, channels.total, dtype=torch.float64, device=self.device)
        by_source = torch.empty(2, channels.sources, dtype=torch.float32, device=self.device)
        by_external = torch.empty(2, channels.external, dtype=torch.float32, device=self.device)
        with on_device(self.device):
            moment_kernels.backward[(len(t.programs),)](
                t.programs, t.operations, t.first, t.second, t.output, t.entry, t.summed, t.summed_span,
                saved[0], flat(shift_scale[1]), flat(by_entering[0]), flat(by_entering[1]), flat(direct[0]),
                flat(direct[1]), grads[0], grads[1], by_source[0], by_source[1], by_external[0], by_external[1],
                channels.sources, len(t.constant_mean), channels.external, t.computed,
                OPS=t.codes, BLOCK=t.block, CHANNELS=t.gathered[0], ENTRIES=t.gathered[1], num_warps=4,
            )  # fmt: skip
        by_mean, by_var = by_external.double()  # the dtype of external moments
        return by_source, by_mean, by_var


def moments_saved(layout: Layout) -> SavedSizes:
    """Length and dtype of what `TritonMoments.forward` saves, known without running it."""
    return [(SLOPES * layout.channels.computed, torch.float64)]


def supports(layout: Layout) -> bool:
    """True if no component of a layout is too long for operations that run one after the other."""
    return layout.channels.computed <= LONGEST or longest_component(layout.channels) <= LONGEST


# --- components and templates ---


@dataclass(frozen=True)
class Template:
    """Components that run the same operations: entry [n, c] is the channel that operation n of component c touches."""

    instructions: tuple[Instruction, ...]
    phases: tuple[int, ...]  # in which launch each of them runs, or after which launch, if torch evaluates it
    first: Tensor  # int64 [operations, components], as `second` and `output`
    second: Tensor
    output: Tensor
    members: tuple[Tensor, ...]  # the channels of every component


class ComponentBlock(NamedTuple):
    """A block of components of one template."""

    template: int
    first_component: int
    components: int
    channels: Tensor


def component_labels(channels: Channels) -> list[int]:
    """For every channel one channel of its component, the same for all channels of the component."""
    parent = list(range(channels.total))
    constants = range(channels.sources, channels.sources + len(channels.constant_mean))
    for step in channels.steps:
        for index in step.inputs:
            for output, channel in enumerate(index.tolist(), step.start):
                if channel not in constants:
                    parent[_root(parent, channel)] = _root(parent, output)
    return [_root(parent, channel) for channel in range(channels.total)]


def _root(parent: list[int], channel: int) -> int:
    while parent[channel] != channel:
        parent[channel] = parent[parent[channel]]
        channel = parent[channel]
    return channel


def longest_component(channels: Channels) -> int:
    """The largest number of operations in one component."""
    return max(Counter(component_labels(channels)[channels.first_computed :]).values(), default=0)


def phases_of(channels: Channels) -> Tensor:
    """For every computed channel the launch that computes it, or after which torch does, counted from 0.

    A step that torch evaluates waits for all that it reads, and what follows from it is computed by a later launch.
    """
    ready = torch.zeros(channels.total, dtype=torch.int64)  # the first launch that can read a channel
    phases = torch.zeros(channels.total, dtype=torch.int64)
    for step in channels.steps:
        phase = torch.stack([ready[index.cpu()] for index in step.inputs]).amax(0)
        by_torch, results = encode(step.function).by_torch, slice(step.start, step.start + step.count)
        phases[results] = phase.amax() if by_torch else phase
        ready[results] = phases[results] + by_torch
    return phases[channels.first_computed :]


def templates_of(channels: Channels) -> list[Template]:
    """All components by their sequence of operations; those without any come last, as one template."""
    instructions = [code for step in channels.steps for code in [encode(step.function)] * step.count]
    phases, first_computed = phases_of(channels).tolist(), channels.first_computed
    members: dict[int, list[int]] = defaultdict(list)
    for channel, root in enumerate(component_labels(channels)):
        members[root].append(channel)
    alike: dict[tuple[tuple[int, Instruction], ...], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for component in members.values():
        computed = [channel for channel in component if channel >= first_computed]
        # by launch, those evaluated by torch after it; each operation still comes after all that it reads
        computed.sort(key=lambda c: (phases[c - first_computed], instructions[c - first_computed].by_torch, c))
        key = tuple((phases[c - first_computed], instructions[c - first_computed]) for c in computed)
        alike[key].append((component, computed))
    none = torch.empty(0, dtype=torch.int64)
    first, second = (torch.cat([none, *(step.inputs[n].cpu() for step in channels.steps)]) for n in (0, -1))
    templates = []
    for key in sorted(alike, key=len, reverse=True):
        outputs = [computed for _, computed in alike[key]]
        output = torch.tensor(outputs, dtype=torch.int64).reshape(len(outputs), len(key)).t()
        arguments = first[output - first_computed], second[output - first_computed]
        components = tuple(torch.tensor(component) for component, _ in alike[key])
        codes, launches = tuple(code for _, code in key), tuple(phase for phase, _ in key)
        templates.append(Template(codes, launches, *arguments, output, components))
    return templates


def component_blocks(templates: list[Template], block: int) -> list[ComponentBlock]:
    """Blocks of at most `block` components, the longest lists of operations first."""
    blocks = []
    for index, template in enumerate(templates):
        size = block if template.instructions else IDLE
        for start in range(0, len(template.members), size):
            members = template.members[start : start + size]
            blocks.append(ComponentBlock(index, start, len(members), torch.cat(members)))
    return blocks


# --- tables ---


class TorchStep(NamedTuple):
    """A function that torch evaluates: the channels it reads, and which of the computed ones it writes."""

    function: Function
    inputs: tuple[Tensor, ...]
    results: slice


@dataclass(frozen=True)
class MomentTables:
    """The tables that `moment_kernels.forward` and `moment_kernels.backward` read; indices are int32."""

    # per program begin and end of its operations, first component and end of its components, begin and end of its
    # entries, begin and end of the channels whose gradients it sums, most entries of one of them
    programs: Tensor
    # for every forward launch its programs, with the operations that it runs; entries in the last alone
    phases: tuple[Tensor, ...]
    # for every launch but the last the functions that torch evaluates after it
    by_torch: tuple[tuple[TorchStep, ...], ...]
    operations: Tensor  # per operation its code and the position of its row in `first`, `second` and `output`
    numbers: Tensor  # per operation its eight numbers
    first: Tensor  # per operation and component the channel of the first argument; `second` and `output` likewise
    second: Tensor
    output: Tensor
    entry: Tensor  # positions among the entering channels, sorted by program and channel
    entry_channel: Tensor  # the channel that enters there
    summed: Tensor  # channels that receive a gradient, by program
    summed_span: Tensor  # begin and end of the entries of each
    nodes: Tensor  # nodes and weights of two halves of [-1, 1]
    knots: Tensor  # per operation code the ends of its panels
    constant_mean: Tensor  # of the constants; `constant_var` likewise
    constant_var: Tensor
    codes: int  # a bit for every operation code that occurs; `forward_codes` without those that torch evaluates
    forward_codes: int
    block: int  # components of a program
    gathered: tuple[int, int]  # how many channels, and entries of each, a program adds the gradients of at a time
    computed: int  # number of computed channels


def build_tables(channels: Channels, device: torch.device) -> MomentTables:
    """The tables of a moment pass."""
    codes = {encode(step.function) for step in channels.steps}
    block = BLOCK_INTEGRATED if any(code.code >= FIRST_INTEGRATED for code in codes) else BLOCK
    templates = templates_of(channels)
    blocks = component_blocks(templates, block)
    by_torch = _torch_steps(channels, device)
    operations, begins = _operation_tables(templates)
    programs, entry, entry_channel, summed, summed_span = _channel_tables(channels, templates, blocks, begins)
    launches = [_programs_of_launch(n, len(by_torch), programs, blocks, templates) for n in range(len(by_torch) + 1)]

    def index(values: Tensor | Sequence[object]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    code_table, numbers, first, second, output = operations
    return MomentTables(
        programs=index(programs),
        phases=tuple(map(index, launches)),
        by_torch=by_torch,
        operations=index(code_table),
        numbers=numbers.to(device),
        first=index(first),
        second=index(second),
        output=index(output),
        entry=index(entry),
        entry_channel=index(entry_channel),
        summed=index(summed),
        summed_span=index(summed_span),
        nodes=_nodes().to(device),
        knots=_knots().to(device),
        constant_mean=channels.constant_mean.to(device, torch.float64),
        constant_var=channels.constant_var.to(device, torch.float64),
        codes=sum(1 << code for code in {code.code for code in codes}),
        forward_codes=sum(1 << code for code in {code.code for code in codes if not code.by_torch}),
        block=block,
        gathered=gathered_at_once(max((program[-1] for program in programs), default=1)),
        computed=channels.computed,
    )


def gathered_at_once(most: int) -> tuple[int, int]:
    """Channels and entries of each, where one has at most `most`: every round of a program waits for memory."""
    entries = min(_MOST_ENTRIES, 1 << max(0, most - 1).bit_length())
    return max(_LEAST_CHANNELS, _GATHERED // entries), entries


def _torch_steps(channels: Channels, device: torch.device) -> tuple[tuple[TorchStep, ...], ...]:
    """The functions that torch evaluates after every launch but the last."""
    phases, first_computed = phases_of(channels), channels.first_computed
    by_phase: dict[int, list[TorchStep]] = defaultdict(list)
    for step in channels.steps:
        if encode(step.function).by_torch:
            start = step.start - first_computed
            inputs = tuple(index.to(device) for index in step.inputs)
            by_phase[int(phases[start])].append(TorchStep(step.function, inputs, slice(start, start + step.count)))
    return tuple(tuple(by_phase[n]) for n in range(max(by_phase, default=-1) + 1))


def _operation_tables(templates: list[Template]) -> tuple[list[Tensor], list[int]]:
    """Operations, numbers and the three tables of channels, all templates together; where each template begins."""
    operations: list[tuple[int, int]] = []
    numbers, begins, position = [], [], 0
    for template in templates:
        begins.append(len(operations))
        for instruction in template.instructions:
            operations.append((instruction.code, position))
            numbers.append(instruction.numbers)
            position += len(template.members)
    channels = [torch.cat([getattr(t, name).reshape(-1) for t in templates]) for name in ("first", "second", "output")]
    return [
        torch.tensor(operations, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(numbers, dtype=torch.float64).reshape(-1, 8),
        *channels,
    ], begins


def _channel_tables(
    channels: Channels, templates: list[Template], blocks: list[ComponentBlock], begins: list[int]
) -> tuple[list[tuple[int, ...]], Tensor, Tensor, Tensor, Tensor]:
    """Programs, entries in the order of programs and channels, and channels that get gradients with their entries."""
    order = torch.cat([block.channels for block in blocks])  # every channel once
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    entering = channels.entering.cpu()
    entry = torch.argsort(rank[entering], stable=True)
    ends = torch.bincount(rank[entering], minlength=len(order)).cumsum(0)
    constant = (order >= channels.sources) & (order < channels.sources + len(channels.constant_mean))
    begin_of = torch.cat([ends.new_zeros(1), ends])
    programs: list[tuple[int, ...]] = []
    slot, summed = 0, 0
    for block in blocks:
        span = slice(slot, slot + len(block.channels))
        counts = (begin_of[1:] - begin_of[:-1])[span][~constant[span]]
        begin, length = begins[block.template], len(templates[block.template].instructions)
        end = block.first_component + block.components
        entries = int(begin_of[span.start]), int(begin_of[span.stop])
        most = int(counts.max()) if len(counts) else 0
        programs.append(
            (begin, begin + length, block.first_component, end, *entries, summed, summed + len(counts), most)
        )
        slot, summed = span.stop, summed + len(counts)
    # Constants lie between the summed channels of programs without operations: a channel's entries need both bounds.
    spans = torch.stack([begin_of[:-1][~constant], begin_of[1:][~constant]], 1)
    return programs, entry, entering[entry], order[~constant], spans


def _programs_of_launch(
    phase: int, last: int, programs: list[tuple[int, ...]], blocks: list[ComponentBlock], templates: list[Template]
) -> list[tuple[int, ...]]:
    """The programs that have something to do in a forward launch, with its operations; entries in the last alone."""
    chosen = []
    for program, block in zip(programs, blocks, strict=True):
        template = templates[block.template]
        runs = [
            n
            for n, (code, launch) in enumerate(zip(template.instructions, template.phases, strict=True))
            if launch == phase and not code.by_torch
        ]
        begin, end = (program[0] + runs[0], program[0] + runs[-1] + 1) if runs else (program[0], program[0])
        entries = program[4:6] if phase == last else (0, 0)
        if runs or entries[0] < entries[1]:
            chosen.append((begin, end, *program[2:4], *entries, *program[6:]))
    return chosen


def _nodes() -> Tensor:
    """Nodes and weights of the two halves of [-1, 1]."""
    x, w = (torch.tensor(values, dtype=torch.float64) for values in gauss_legendre(16))
    return torch.cat([0.5 * x - 0.5, 0.5 * x + 0.5, 0.5 * w, 0.5 * w])


def _knots() -> Tensor:
    table = torch.full((OPERATIONS, PANELS + 1), _FAR, dtype=torch.float64)
    table[:, 0] = -_FAR
    for code, knots in BENDS.items():
        table[code, 1 : len(knots) + 1] = torch.tensor(knots, dtype=torch.float64)
    return table
