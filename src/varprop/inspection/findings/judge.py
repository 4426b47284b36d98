"""What is wrong with a network, in plain words, the worst first, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..numbers.row import ReportRow
from .finding import ORDER, Finding, Severity, times
from .thresholds import ALWAYS_ON, CONSTANT, DEAD, GRADIENT, GROWN, SATURATED, SHRUNK, STANDARD_ERRORS

ARGUMENTS = "model, moments"
INIT = f"initialize by vp.init_({ARGUMENTS})"
REMEDY = f"{INIT}, or train with vp.normalize({ARGUMENTS})"
NAMED = 4  # layers that one finding names
OFF_PATH = ("branch", "in branch", "gate", "data")  # roles of what lies beside the way of the signal, or before it
ASIDE = ("normalized", "query", "head", "token", *OFF_PATH)  # and of what else may be small or nearly constant


def findings(rows: list[ReportRow], unsettled: int = 0, arguments: str = ARGUMENTS) -> tuple[Finding, ...]:
    """All findings, errors first, in the order of the network within a severity.

    `unsettled` batch norms have seen no data; `arguments` are those of the calls that are advised.
    """
    layers = [row for row in rows if row.is_layer]
    # a pool or a gate may be small or nearly constant with good reason, what a layer passes to a nonlinearity not
    weighted = [row for row in layers if row.weighted and row.role != "gate"] or layers
    known = {id(row) for row in weighted}
    path = [row for row in layers if id(row) in known or row.role == "stream"]
    data = next((row.growth for row in reversed(layers) if row.role == "data" and row.growth), 1.0)
    found = [*_growth(layers, path, max(1.0, data)), *_gradient(rows)]
    found += _decay(_judged([row for row in path if row is not weighted[-1]], weighted), min(1.0, data))
    found += [*_shift(_judged(weighted[:-1] or weighted, weighted)), *_constant(layers, weighted)]
    found += _unsettled(unsettled)
    alike = any(any(row.uniform[2:]) for row in rows)
    for row in layers:
        found += [*_softened(row, [*_saturation(row), *_rectifier(row)]), *_disagreement(row, alike)]
    found = [*_merged(found), *_approximations(layers)]
    found = [replace(one, advice=one.advice.replace(f"({ARGUMENTS}", f"({arguments}")) for one in found]
    return tuple(sorted(found, key=lambda finding: ORDER[finding.severity]))


def _judged(rows: list[ReportRow], weighted: list[ReportRow]) -> list[ReportRow]:
    """Those that may not be small or nearly constant.

    A layer that may be in one of its calls may be in all, by the same weights: one that refines its prediction, say.
    """
    excused = {row.path for row in weighted if row.kind == "module" and row.role in ASIDE}
    return [row for row in rows if row.role not in ASIDE and row.path not in excused]


def _merged(found: list[Finding]) -> Iterator[Finding]:
    """Errors one by one; of several warnings or notes of one kind the worst, which names the others."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    for (severity, _), group in groups.items():
        if severity == "error" or len(group) == 1:
            yield from group
        else:
            worst = max(group, key=lambda finding: finding.value)
            names = ", ".join(finding.where for finding in group[:NAMED]) + (", ..." if len(group) > NAMED else "")
            yield replace(worst, text=f"{worst.text} (the most of {len(group)} such layers: {names})")


def _unsettled(count: int) -> Iterator[Finding]:
    if count:
        text = f"{count} batch norm(s) have seen no data: they are taken as in training, by the statistics of the batch"
        yield Finding("note", "unsettled", "(model)", text, "load the weights if there are some", float(count))


def _graded(value: float, warning: float, error: float) -> Severity | None:
    return "error" if value >= error else "warning" if value >= warning else None


def _milder(severity: Severity) -> Severity:
    return "warning" if severity == "error" else "note"


def _extreme(
    rows: list[ReportRow], value: Callable[[ReportRow], float], limits: tuple[float, float]
) -> Iterator[tuple[Severity, ReportRow, ReportRow]]:
    """The severity of the worst row, the first one beyond the threshold, and the worst; nothing if none is beyond."""
    beyond = [row for row in rows if value(row) >= limits[0]]
    if beyond:
        worst = max(beyond, key=value)
        yield _graded(value(worst), *limits) or "warning", beyond[0], worst


def _growth(layers: list[ReportRow], path: list[ReportRow], prepared: float) -> Iterator[Finding]:
    """Where growth of the standard deviation begins, and how far it goes; before a normalization it is no matter.

    `prepared`: what the data have grown by before the first parameter, which no layer can help.
    """
    judged = [
        row
        for row in [*(row for row in layers if row.op == "embedding"), *path]
        if row.role not in ("normalized", "data")
    ]
    for severity, first, worst in _extreme(judged, lambda row: _grown(row) / prepared, GROWN):
        if first.growth is not None:
            yield _of_size("growth", "grown", severity, first, worst)
        else:
            text = f"std is {_grown(first):.3g}, where what follows from tokens should be about 1"
            text += f", and reaches {_grown(worst):.3g} at {worst.label}" if worst is not first else ""
            yield Finding(severity, "growth", first.label, text, "make embeddings or weights smaller", _grown(worst))


def _grown(row: ReportRow) -> float:
    """The std over that of the input; tokens have none, and count as 1."""
    return row.numbers["std"] if row.growth is None else row.growth


def _decay(rows: list[ReportRow], prepared: float) -> Iterator[Finding]:
    """The same for decay; what the last layer gives before it has learned may be small."""
    for found in _extreme(rows, lambda row: prepared / row.growth if row.growth else 0.0, SHRUNK):
        yield _of_size("decay", "shrunk", *found)


def _of_size(kind: str, verb: str, severity: Severity, first: ReportRow, worst: ReportRow) -> Finding:
    text = f"std has {verb} to {times(first.growth or 0.0)} that of the input"
    text += f", and reaches {times(worst.growth or 0.0)} it at {worst.label}" if worst is not first else ""
    return Finding(severity, kind, first.label, text, REMEDY, worst.growth or 0.0)


def _softened(row: ReportRow, found: Iterable[Finding]) -> Iterator[Finding]:
    """No warning, though an error, where units are as they are by design.

    Averages hardly vary, so that units of a gate are on, off or flat by their mean. What is rectified already is not
    cut a second time where a small branch has been added to it.
    """
    for one in found:
        by_design = row.role == "gate" or (row.role == "rectified stream" and one.kind == "always_on")
        yield replace(one, severity="note") if by_design and one.severity == "warning" else one


def _shift(rows: list[ReportRow]) -> Iterator[Finding]:
    """Units that are nearly constant: their mean square is almost all mean.

    A batch norm takes that off again, of a branch only what it adds to its stream matters, averages over positions,
    inner products and class tokens hardly vary, and heads have a bias against it.
    """
    judged = [row for row in rows if row.role != "similarity"]
    for severity, first, worst in _extreme(judged, lambda row: 1 / max(1 - row.numbers["shift"], 1e-30), CONSTANT):
        text = f"{_exact_percent(first.numbers['shift'])} of the mean square is a constant: the units hardly vary"
        text += f" ({_exact_percent(worst.numbers['shift'])} at {worst.label})" if worst is not first else ""
        yield Finding(severity, "shift", first.label, text, REMEDY, worst.numbers["shift"])


def gradient_ends(rows: list[ReportRow]) -> tuple[ReportRow, ReportRow] | None:
    """The first and the last row by which gradients are judged.

    In residual networks they are sums of blocks, and layers whose scale counts: gradients are as small as their branch,
    and before a normalization as large as weights are small. Elsewhere they are layers with weights, or any layers.
    """
    layers = [row for row in rows if row.leaf and row.gradient_total is not None]
    weighted = [row for row in layers if row.weighted and row.role not in (*OFF_PATH, "query")]
    streams = {id(row) for row in layers if row.role in ("stream", "token")}
    free = {id(row) for row in weighted if row.role != "normalized"}
    path = [row for row in layers if id(row) in streams | free] if streams else weighted
    # the weights of a module that is called several times get the gradients of all its calls
    largest: dict[str, ReportRow] = {}
    for row in path if len(path) > 1 else [row for row in layers if row.role != "data"] or layers:
        key = row.path if row.kind == "module" else row.label
        if key not in largest or (row.gradient_total or 0.0) > (largest[key].gradient_total or 0.0):
            largest[key] = row
    judged = [row for row in layers if any(row is one for one in largest.values())]
    return (judged[0], judged[-1]) if judged and judged[-1].gradient_total else None


def gradient_ratio(rows: list[ReportRow]) -> float | None:
    """Gradient at the first of them over that at the last, both summed over positions."""
    ends = gradient_ends(rows)
    return None if ends is None else (ends[0].gradient_total or 0.0) / (ends[1].gradient_total or 1.0)


def _gradient(rows: list[ReportRow]) -> Iterator[Finding]:
    """Gradients that grow or fade from the last layer to the first.

    Large ones before a normalization are milder than they look: a step that is too long makes the weights longer, the
    normalization takes that back, and gradients and steps are shorter from then on (Arora, Li & Lyu 2019).
    """
    ends, ratio = gradient_ends(rows), gradient_ratio(rows)
    if ends and ratio and (severity := _graded(max(ratio, 1 / ratio), *GRADIENT)):
        kind = "explode" if ratio > 1 else "vanish"
        if kind == "explode" and ends[0].role == "normalized":
            severity = _milder(severity)
        text = f"gradients {kind}: at the first layer they are {times(ratio)} those at the last ({ends[1].label})"
        yield Finding(severity, kind, ends[0].label, text, REMEDY, ratio)


def _saturation(row: ReportRow) -> Iterator[Finding]:
    share = row.numbers.get("saturated", 0.0)
    if severity := _graded(share, *SATURATED):
        text = f"outputs of {share:.0%} of its units saturate (in the flat part {row.numbers['flat']:.0%} of the time)"
        if row.growth is not None:
            verb = "grown" if row.growth > 1 else "shrunk"
            text = f"std has {verb} to {times(row.growth)} that of the input; {text}"
        yield Finding(severity, "saturated", row.label, text, f"make its input smaller: {REMEDY}", share)


def _rectifier(row: ReportRow) -> Iterator[Finding]:
    """Units that never change sides.

    Weights have no preferred sign: where means are large they leave as many units dead as always on, but for chance.
    """
    dead, always = row.numbers.get("dead", 0.0), row.numbers.get("always_on", 0.0)
    chance = STANDARD_ERRORS * math.sqrt((dead + always) / len(row.ranges["low"]))
    if dead:
        text = f"{_at_least(dead)} of its units are dead: they are on less than once in a thousand times"
        severity = _graded(dead, *DEAD) if dead - always > chance else None
        yield Finding(severity or "note", "dead", row.label, text, f"raise the biases before it, {REMEDY}", dead)
    if always:
        text = f"{_at_least(always)} of its units are always on: for them the rectifier does nothing"
        severity = "warning" if always >= ALWAYS_ON and always - dead > chance else None
        advice = f"lower the biases before it, {INIT}"
        yield Finding(severity or "note", "always_on", row.label, text, advice, always)


def _at_least(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _exact_percent(share: float) -> str:
    """Close to the whole the digits that count are those after the nines."""
    missing = (1 - share) * 100
    digits = max(0, math.ceil(-math.log10(missing))) if missing > 1e-4 else 0
    return f"{100 - missing:.{digits}f} %" if missing > 1e-4 else "all"


def _constant(rows: list[ReportRow], weighted: list[ReportRow]) -> Iterator[Finding]:
    """Units that do not vary: single channels of layers with weights, and the first whole layer.

    That is bad where the output is constant with it; a last layer may start at zero on purpose, and a branch as long as
    gradients reach what makes it zero.
    """
    rows = [
        row for row in rows if row.role not in ("gate", "query") and not (row.role in OFF_PATH and row.gradient_total)
    ]
    for row in weighted:
        if 0 < row.constant < 1:
            text = f"{_at_least(row.constant)} of its units do not vary"
            advice = "look for rows of zeros in its weights, or for units before it that are dead"
            yield Finding("warning", "constant", row.label, text, advice, row.constant)
    whole = next((row for row in rows if row.std.most == 0 and "dead" not in row.numbers), None)
    if whole is not None and whole.label == weighted[-1].label:
        text = "none of its units varies: the output starts at zero, and nothing before it gets a gradient at first"
        yield Finding("note", "constant", whole.label, text, "leave it if that is on purpose", 1.0)
    elif whole is not None:
        advice = "look for zeros in its weights, or for a layer before it that is dead"
        severity: Severity = "error" if rows[-1].std.most == 0 else "warning"
        yield Finding(severity, "constant", whole.label, "none of its units varies", advice, 1.0)


def _disagreement(row: ReportRow, alike: bool) -> Iterator[Finding]:
    """The measured std tells a different story than the analytic one; `alike`: positions were taken as such."""
    seen, own = row.measured.get("std"), row.numbers["std"]
    if not seen or not seen["value"] or not own or row.kind != "module":
        return
    value, error, ratio = seen["value"], seen["error"], own / seen["value"]
    if not 2 / 3 < ratio < 3 / 2 and abs(own - value) >= 4 * error:
        text = f"the analytic std is {times(ratio)} the measured one ({value:.3g} +- {error:.1g})"
        apart = ", or keep positions apart: moments of every element, --positions on the command line"
        advice = "trust the measured numbers of this layer" + (apart if alike else "")
        yield Finding("note", "disagreement", row.label, text, advice, ratio)


def _approximations(rows: list[ReportRow]) -> Iterator[Finding]:
    back = [row for row in rows if row.gradient_reason]
    sampled = [row for row in rows if row.status == "sampled"]
    if back:
        text = f"{back[-1].gradient_reason} ({len(back)} place(s)): gradient scales before it are approximate"
        advice = f'compare with vp.inspect({ARGUMENTS}, check="gaussian")'
        yield Finding("note", "backward", back[-1].label, text, advice, float(len(back)))
    if sampled:
        text = f"{len(sampled)} operation(s) without a rule were estimated by sampling"
        yield Finding("note", "sampled", sampled[0].label, text, "write a rule with @vp.rule", float(len(sampled)))
