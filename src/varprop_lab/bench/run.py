"""The whole benchmark: case by case, mode by mode, kept after every piece."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import varprop as vp
from varprop.cli.models import first_line
from varprop_lab import environment

from ..environment import chosen_device
from ..store.folder import locked
from .cases import STEP, Case, cases, default_cases, default_modes, title, variants_of
from .record import FILE, Inference, Measurement, Record, tables, write_page
from .step import (
    LR,
    BenchModel,
    TimedStep,
    autocast,
    clean,
    drop_traces,
    interleaved,
    kernels,
    make_step,
    network,
    prime,
)

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
