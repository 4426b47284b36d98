"""The benchmark: a training step in each mode, its time, memory and kernels; case by case, kept after every piece."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.cli.models import first_line
from varprop.text_table import Table
from varprop_lab import environment

from ..environment import chosen_device, locked, write_atomically
from ..report import facts
from ..training import captured
from .cases import STEP, Case, cases, default_cases, default_modes, title, variants_of


def clean() -> None:
    """Give unused memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak of memory in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def kernels(step: Callable[[], Any], device: torch.device) -> int | None:
    """How many kernels the GPU runs in a step, as the profiler sees them; None where it sees none."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return count_kernels(json.loads(trace.read_text("utf-8"))) or None


def count_kernels(trace: dict[str, Any]) -> int:
    """Kernels in a trace: not copies, fills, calls on the host, or annotations."""
    return sum(event.get("cat") == "kernel" for event in trace.get("traceEvents", []))


Function = Callable[[], Any]


def interleaved(
    functions: Mapping[str, Function], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of one call of every function, once a round; each round begins with another function.

    `seconds` are for all turns of one function together; each turn is at least one call, and the device is waited for
    at both ends of it.
    """
    counts = {name: repetitions(function, seconds / rounds, device) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            times[name].append(timed(functions[name], counts[name], device))
    return times


def repetitions(function: Function, seconds: float, device: torch.device) -> int:
    """How many calls take about that long; it is called twice before, to be warm."""
    function()
    function()
    once = timed(function, 1, device)
    return max(1, min(1000, round(seconds / once)))


def timed(function: Function, count: int, device: torch.device) -> float:
    """Mean seconds of a call, from an idle device until everything is done."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        function()
    wait(device)
    return (time.perf_counter() - start) / count


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(value / divisor for value, divisor in zip(values, base, strict=True))


TimedStep = Callable[[], Tensor]  # returns the loss
LR = 1e-7  # nothing is learned: what is timed must not depend on how training goes
SETTLE = 6  # steps after which all that is recorded when repeated is


@dataclass(frozen=True)
class BenchModel:
    """A model of a case with its batch, used in all modes."""

    case: Case
    variant: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    bytes: int  # device memory that the model took when it was made
    losses: dict[str, Callable[..., Tensor]]  # compiled, by precision; filled when first asked for

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.images.device

    def loss(self, name: str) -> Callable[..., Tensor]:
        """Mean cross entropy of images and labels.

        What is compiled is kept by code object; if variants shared one, each call would look through all of them.
        """
        model = self.model

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(images), labels)

        loss.__code__ = loss.__code__.replace(co_name=f"loss_{self.case.name}_{self.variant.replace('-', '_')}_{name}")
        return loss

    def compiled(self, precision: str, backend: str) -> Callable[..., Tensor]:
        """The loss compiled, with the same settings for all variants."""
        if precision not in self.losses:
            compiled = torch.compile(self.loss(precision), backend=backend, fullgraph=True, dynamic=False)
            self.losses[precision] = compiled
        return self.losses[precision]


def network(case: Case, variant: str, images: Tensor, labels: Tensor) -> BenchModel:
    """Built on the device of the batch."""
    clean()  # what others left behind must not be counted as freed by this one
    before = allocated(images.device)
    model = case.network(variant, images.device)
    clean()
    return BenchModel(case, variant, model, images, labels, allocated(images.device) - before, {})


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 for ``bf16``, nothing otherwise."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def optimizer(network: BenchModel, capturable: bool) -> torch.optim.Optimizer:
    """The optimizer of the case over all parameters, with the foreach implementation."""
    parameters = list(network.model.parameters())
    if network.case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=LR, foreach=True, capturable=capturable)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, foreach=True)


def make_step(network: BenchModel, mode: str, backend: str) -> tuple[TimedStep, int]:
    """The step of a mode, warmed up, and the peak of device memory in it.

    Raises:
        RuntimeError: Whatever torch raises if it cannot be compiled, captured, or held in memory.
    """
    precision = network.case.precision(mode)
    loss_of = network.loss(mode) if mode == "eager" else network.compiled(precision, backend)
    if mode == "captured":
        capture_stream(network.device)
    before = allocated(network.device)
    update = optimizer(network, capturable=mode == "captured")

    def step() -> Tensor:
        update.zero_grad(set_to_none=True)
        with autocast(precision, network.device):
            loss = loss_of(network.images, network.labels)
        loss.backward()
        update.step()
        return loss.detach()

    final = _captured(step, network) if mode == "captured" else _warm(step, network)
    return final, peak(network.device) - before + network.bytes


def _warm(step: TimedStep, network: BenchModel) -> TimedStep:
    """The step itself after a few runs, the last of which is watched."""
    for _ in range(SETTLE):
        step()
    reset_peak(network.device)
    step()
    return step


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all captures."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        prime(device)
    return stream


def prime(device: torch.device) -> None:
    """Let a GPU's libraries take their workspaces, which would be counted as memory of whichever step comes first.

    A CPU has none, and one without bfloat16 would compute without oneDNN from there on.
    """
    if device.type == "cpu":
        return
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()


def _captured(step: TimedStep, network: BenchModel) -> TimedStep:
    def settle() -> None:
        network.model.zero_grad(set_to_none=True)
        clean()
        reset_peak(network.device)

    replay = captured(step, capture_stream(network.device), settle)
    replay()
    return replay


def drop_traces(network: BenchModel) -> None:
    """Let go of gradients and of folded weights, so that the next mode finds the model as it was made."""
    network.model.zero_grad(set_to_none=True)
    network.model.eval().train()
    clean()


CPU_ROUNDS, GPU_ROUNDS = 11, 15
GPU_BUDGET = 340.0
BUSY = 0.7  # a run of the benchmark just before leaves more than 0


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark; None stands for the default of the device."""

    device: str = "auto"  # or ``cpu`` or ``cuda``
    cases: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None  # None: all in eager mode, few where compilation takes long
    rounds: int | None = None  # turns of every variant
    seconds: float = 0.5  # for all turns of one cell together
    max_seconds: float | None = None  # nothing new is begun after that
    out: Path = Path("runs/bench")
    tiny: bool = False  # small sizes and a fast compiler, to try the benchmark itself

    @property
    def backend(self) -> str:
        """The backend of torch.compile."""
        return "aot_eager" if self.tiny else "inductor"


class Session:
    """A run under way, with nothing measured yet; `say` gets the lines of progress."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        on_gpu = device.type == "cuda"
        self.options, self.device, self.say = options, device, say
        self.started = time.perf_counter()
        self.rounds = options.rounds or (GPU_ROUNDS if on_gpu else CPU_ROUNDS)
        self.limit = options.max_seconds or (GPU_BUDGET if on_gpu else math.inf)
        source = environment.provenance(device)
        self.record = Record(
            {
                **source,
                "hardware": {**source["hardware"], "load": load()},
                "seconds": 0.0,
                "finished": False,
                "step": STEP,
                "settings": {"rounds": self.rounds, "seconds": options.seconds, "lr": LR, "tiny": options.tiny},
            }
        )
        if load() >= BUSY:
            self.note(f"Other work is running here (load {load():.1f}): with more than one thread times say little.")

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.started

    def save(self) -> None:
        """Write what there is."""
        self.record.manifest["seconds"] = round(self.spent, 1)
        self.record.write(self.options.out)

    def is_over(self, name: str) -> bool:
        """True if the time is over; then it is noted that something is skipped."""
        if over := self.spent > self.limit:
            self.note(f"{name}: skipped, {self.limit:.0f} s are over")
        return over

    def print(self, text: str) -> None:
        """A line of progress."""
        self.say(f"[{self.spent:6.1f} s] {text}")

    def note(self, text: str) -> None:
        """A line of progress that stays in the results."""
        self.record.notes.append(text)
        self.print(text)


def load() -> float:
    """Processes that ran in the last minute, on average; 0 where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@contextlib.contextmanager
def settings(device: torch.device) -> Iterator[None]:
    """TF32 and cuDNN's choice of the fastest algorithm on a GPU; no denormal numbers on a CPU, which are slow."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    if device.type == "cpu":
        torch.set_flush_denormal(True)
    else:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_flush_denormal(False)


def measure(options: Options) -> None:
    """Run the benchmark, print its tables, and say where the results are."""
    print(STEP, flush=True)
    record = run(options, say=lambda text: print(text, flush=True))
    print()
    print("\n\n".join(table.plain() for table in tables(record)))
    page = write_page(record, options.out)
    print(f"\nResults: {options.out / FILE}, {page}")


def run(options: Options, say: Callable[[str], None] = print) -> Record:
    """Measure everything that was asked for; the results are in the folder after every piece.

    Raises:
        VarpropError: If the device is not there.
    """
    device = chosen_device(options.device)
    session = Session(options, device, say)
    available = cases(device, options.tiny)
    with settings(device), locked(options.out):
        prime(device)
        session.save()
        for name in options.cases or default_cases(device):
            _measure_case(session, available[name], options.modes or default_modes(device), options.variants)
    session.record.manifest["finished"] = True
    session.save()
    return session.record


def _measure_case(session: Session, case: Case, modes: tuple[str, ...], wanted: tuple[str, ...] | None) -> None:
    """All modes of a case, then inference."""
    images, labels = case.data(session.device)
    networks: dict[str, BenchModel] = {}

    def network_of(variant: str) -> BenchModel:
        if variant not in networks:
            networks[variant] = network(case, variant, images, labels)
        return networks[variant]

    for mode in modes:
        if mode == "captured" and session.device.type != "cuda":
            session.note(f"{case.name} captured: skipped, a CPU has no CUDA graphs")
            continue
        _measure_mode(session, case, mode, variants_of(case, mode, wanted), network_of)
        for network_made in networks.values():
            drop_traces(network_made)
    if wanted is None or "analytic" in wanted:
        attempt(session, f"{case.name} inference", lambda: _add_inference(session, network_of("analytic")))
    if any(network_made.losses for network_made in networks.values()):
        torch._dynamo.reset()
    networks.clear()
    clean()


def _measure_mode(
    session: Session, case: Case, mode: str, variants: tuple[str, ...], network_of: Callable[[str], BenchModel]
) -> None:
    """Prepare all variants, then time them in turns."""
    steps: dict[str, TimedStep] = {}
    cells: dict[str, Measurement] = {}
    for variant in variants:
        empty = Measurement(case.name, case.title, mode, variant, case.precision(mode), case.batch)
        cells[variant], step = _prepared(session, empty, network_of)
        steps |= {variant: step} if step else {}
    times = interleaved(steps, session.rounds, session.options.seconds, session.device)
    for variant, step in steps.items():
        loss = float(step())
        odd = "" if math.isfinite(loss) else f"the loss is {loss}"
        cells[variant] = replace(cells[variant], rounds=tuple(times[variant]), note=odd)
    session.record.cells += cells.values()
    session.save()
    for cell in (cells[variant] for variant in steps):
        ratio = session.record.time_ratio(cell)
        more = "" if ratio is None else f", {ratio:.3f} x none"
        session.print(f"{cell.case} {cell.mode} {title(cell.variant)}: {1e3 * cell.seconds:.3f} ms{more}")


def _prepared(
    session: Session, cell: Measurement, network_of: Callable[[str], BenchModel]
) -> tuple[Measurement, TimedStep | None]:
    """The step of a cell, and what is known before it is timed; no step if there is no time or it fails."""
    name = f"{cell.case} {cell.mode} {title(cell.variant)}"
    if session.is_over(name):
        return replace(cell, note="no time left"), None
    start = time.perf_counter()
    try:
        step, memory = make_step(network_of(cell.variant), cell.mode, session.options.backend)
        count = kernels(step, session.device)
    except Exception as error:  # one variant that fails must not take the others with it
        session.note(f"{name}: failed, {first_line(error)}")
        clean()
        return replace(cell, note=first_line(error)), None
    seconds = time.perf_counter() - start
    session.print(f"{name}: ready in {seconds:.1f} s")
    return replace(cell, preparing=seconds, memory=memory or None, kernels=count), step


def attempt(session: Session, name: str, action: Callable[[], None]) -> None:
    """Do it if there is time; a failure is noted."""
    if session.is_over(name):
        return
    try:
        action()
    except Exception as error:  # as above
        session.note(f"{name}: failed, {first_line(error)}")
    session.save()


def _add_inference(session: Session, analytic: BenchModel) -> None:
    """The folded model is the plain model: the same time, the same bits."""
    case, device = analytic.case, session.device
    models = {"folded": vp.fold(analytic.model).eval(), "plain": case.network("none", device).eval()}
    models["plain"].load_state_dict(models["folded"].state_dict())
    with torch.inference_mode(), autocast(case.eager, device):
        identical = torch.equal(*(model(analytic.images) for model in models.values()))
        functions = {name: lambda model=model: model(analytic.images) for name, model in models.items()}
        times = interleaved(functions, session.rounds, session.options.seconds, device)
    sides = tuple(times["folded"]), tuple(times["plain"])
    inference = Inference(case.name, case.title, case.eager, *sides, identical)
    session.record.inferences.append(inference)
    same = "bit-identical" if identical else "NOT bit-identical"
    session.print(f"{inference.case} folded inference: {inference.ratio:.3f} x plain, {same}")


# --- what was measured, the file it is kept in, and its tables ---

FILE = "normalization.json"
ROOM = "make room and run the command again"  # what to do when the disk is full


@dataclass(frozen=True)
class Measurement:
    """One variant in one mode of one case."""

    case: str
    title: str  # of the case
    mode: str
    variant: str
    precision: str
    batch: int  # samples in a step
    preparing: float = 0.0  # seconds of building, compiling and warming up
    memory: int | None = None  # peak bytes of a step; None on a CPU
    kernels: int | None = None  # that the GPU runs in a step
    rounds: tuple[float, ...] = ()  # seconds of a step, one number a round; empty if it could not be measured
    note: str = ""  # why not, or what is odd

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return quartiles(self.rounds)[1] if self.rounds else math.nan

    @property
    def group(self) -> str:
        """Case, mode and precision in a few words."""
        return f"{self.title}, batch {self.batch}, {self.mode} {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the quartiles."""
        lower, middle, upper = quartiles(self.rounds) if self.rounds else (None, None, None)
        return {**asdict(self), "seconds": middle, "lower_quartile": lower, "upper_quartile": upper}


@dataclass(frozen=True)
class Inference:
    """The folded model beside the plain model with the same weights."""

    case: str
    title: str
    precision: str
    folded: tuple[float, ...]
    plain: tuple[float, ...]
    identical: bool

    @property
    def ratio(self) -> float:
        """Time of the folded model over that of the plain one."""
        return ratio(self.folded, self.plain)


@dataclass
class Record:
    """Everything of a run; grows while it runs."""

    manifest: dict[str, Any]
    cells: list[Measurement] = field(default_factory=list)
    inferences: list[Inference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cell(self, case: str, mode: str, variant: str) -> Measurement | None:
        """One that was measured."""
        matching = (c for c in self.cells if (c.case, c.mode, c.variant) == (case, mode, variant) and c.rounds)
        return next(matching, None)

    def time_ratio(self, cell: Measurement) -> float | None:
        """Time of a step over that without normalization in the same rounds; None if that was not measured."""
        plain = self.cell(cell.case, cell.mode, "none")
        if plain is None or len(plain.rounds) != len(cell.rounds) or not cell.rounds:
            return None
        return ratio(cell.rounds, plain.rounds)

    def memory_ratio(self, cell: Measurement) -> float | None:
        """Memory of a step over that without normalization; None if that was not measured."""
        plain = self.cell(cell.case, cell.mode, "none")
        return cell.memory / plain.memory if plain and plain.memory and cell.memory else None

    def write(self, folder: Path) -> None:
        """Keep all that there is, whole or not at all."""
        values = {
            **self.manifest,
            "cells": [{**c.to_dict(), "ratio": self.time_ratio(c)} for c in self.cells],
            "inference": [{**asdict(i), "ratio": i.ratio} for i in self.inferences],
            "notes": self.notes,
        }
        write_atomically(folder / FILE, f"{json.dumps(values, indent=1)}\n".encode(), then=ROOM)


_LEFT = ("variant", "model", "note")


def tables(record: Record) -> list[Table]:
    """Everything that was measured."""
    groups: dict[str, list[Measurement]] = {}
    for cell in record.cells:
        groups.setdefault(cell.group, []).append(cell)
    columns = ("variant", "step ms", "quartiles", "x none", "MiB", "x none", "kernels", "note")
    result = [Table(name, columns, [_step(record, c) for c in cells], _LEFT) for name, cells in groups.items()]
    if record.inferences:
        result.append(_inference(record))
    return [table.without_empty_columns() for table in result]


def _step(record: Record, cell: Measurement) -> Sequence[str]:
    if not cell.rounds:
        return title(cell.variant), "", "", "", "", "", "", cell.note
    lower, middle, upper = (f"{1e3 * value:.3f}" for value in quartiles(cell.rounds))
    memory = "" if cell.memory is None else f"{cell.memory / 2**20:.1f}"
    ratios = _ratio(record.time_ratio(cell)), _ratio(record.memory_ratio(cell))
    count = "" if cell.kernels is None else str(cell.kernels)
    return title(cell.variant), middle, f"{lower}-{upper}", ratios[0], memory, ratios[1], count, cell.note


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _inference(record: Record) -> Table:
    rows = []
    for inference in record.inferences:
        times = [f"{1e3 * quartiles(seconds)[1]:.3f}" for seconds in (inference.folded, inference.plain)]
        same = "yes" if inference.identical else "NO"
        rows.append((f"{inference.title}, {inference.precision}", *times, _ratio(inference.ratio), same))
    return Table("Inference", ("model", "folded ms", "plain ms", "x plain", "same bits"), rows, _LEFT)


def write_page(record: Record, folder: Path) -> Path:
    """All that was measured, with the command and the machine, as Markdown beside the file of numbers."""
    lines = [f"- {name}: {f'`{value}`' if name == 'Command' else value}" for name, value in facts(record.manifest)]
    how = "\n".join(lines) + f"\n\n{record.manifest['step']}"
    sections = [f"# What the normalizations cost\n\n{how}"]
    sections += [f"## {table.heading}\n\n{table.markdown()}" for table in tables(record) if table.rows]
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    path = (folder / FILE).with_suffix(".md")
    write_atomically(path, ("\n\n".join(sections) + "\n").encode(), then=ROOM)
    return path
