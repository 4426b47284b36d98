"""What is wrong with a network, in plain words, the worst first, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..numbers.row import ReportRow
from .finding import ORDER, Finding, Severity
from .thresholds import ALWAYS_ON, CONSTANT, DEAD, GRADIENT, GROWN, SATURATED, SHRUNK

INIT = "initialize by vp.init_(model, moments)"
NORMALIZE = "or train with vp.normalize(model, moments)"
NUMBER = ".3g"
NAMED = 4  # layers that one finding names


def findings(rows: list[ReportRow], gradient_ratio: float | None, unsettled: int = 0) -> tuple[Finding, ...]:
    """All findings, errors first, in the order of the network within a severity.

    Args:
        rows: Of the report.
        gradient_ratio: Gradient at the first layer over that at the last.
        unsettled: How many batch norms have seen no data: in training they would rescale what grows or shrinks, so
            that this is no error yet.
    """
    layers = [row for row in rows if row.is_layer]
    # a pool or a gate may be small or nearly constant with good reason, what a layer passes to a nonlinearity not
    weighted = [row for row in layers if row.weighted] or layers
    scale = [*_size(weighted), *_gradient(weighted, gradient_ratio), *_shift(weighted)]
    found: list[Finding] = [*_unsettled(scale, unsettled), *_softened(scale, unsettled), *_constant(layers, weighted)]
    alike = any(any(row.uniform[2:]) for row in rows)
    for row in layers:
        found += [*_saturation(row), *_softened(_rectifier(row), row.unsettled), *_disagreement(row, alike)]
    found = [*_merged(found), *_approximations(layers)]
    return tuple(sorted(found, key=lambda finding: ORDER[finding.severity]))


def _merged(found: list[Finding]) -> list[Finding]:
    """Findings with notes and warnings of one kind, where there are several, told as one."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    return [one for (severity, _), group in groups.items() for one in (group if severity == "error" else _one(group))]


def _one(group: list[Finding]) -> list[Finding]:
    worst = max(group, key=lambda finding: finding.value)
    if len(group) == 1:
        return group
    others = f" (the most of {len(group)} such layers: {', '.join(finding.where for finding in group[:NAMED])}"
    text = worst.text + others + (", ...)" if len(group) > NAMED else ")")
    return [replace(worst, text=text)]


def _softened(found: list[Finding], soften: int | bool) -> list[Finding]:
    """Errors as warnings where a batch norm has yet to see the data it will divide by."""
    return [replace(one, severity="warning") if soften and one.severity == "error" else one for one in found]


def _unsettled(found: list[Finding], count: int) -> list[Finding]:
    if not count:
        return []
    text = (
        f"{count} batch norm(s) have seen no data yet (mean 0, variance 1) and change nothing here; in training they "
        f"rescale what grows or shrinks"
    )
    advice = "send data through in training mode before judging the scales, or replace them by vp.normalize"
    return [Finding("warning" if found else "note", "unsettled", "(model)", text, advice, float(count))]


def _graded(value: float, warning: float, error: float) -> Severity | None:
    return "error" if value >= error else "warning" if value >= warning else None


def _size(rows: list[ReportRow]) -> list[Finding]:
    """Growth and decay of the standard deviation: where each begins, and how far it goes."""
    known = [row for row in rows if row.growth is not None]
    grown = _extreme(known, lambda row: row.growth or 0.0, *GROWN)
    shrunk = _extreme([row for row in known if row.growth], lambda row: 1 / (row.growth or 1.0), *SHRUNK)
    found = []
    for kind, verb, far in (("growth", "grown", grown), ("decay", "shrunk", shrunk)):
        if far:
            severity, first, worst = far
            text = f"std has {verb} to {first.growth:{NUMBER}} times that of the input"
            text += f", and reaches {worst.growth:{NUMBER}} times at {worst.label}" if worst is not first else ""
            found.append(Finding(severity, kind, first.label, text, f"{INIT}, {NORMALIZE}", worst.growth or 0.0))
    return found


def _extreme(
    rows: list[ReportRow], value: Callable[[ReportRow], float], warning: float, error: float
) -> tuple[Severity, ReportRow, ReportRow] | None:
    """The severity of the worst row, the first one beyond the threshold, and the worst."""
    beyond = [row for row in rows if value(row) >= warning]
    if not beyond:
        return None
    worst = max(beyond, key=value)
    return _graded(value(worst), warning, error) or "warning", beyond[0], worst


def _shift(rows: list[ReportRow]) -> list[Finding]:
    """Units that are nearly constant: their mean square is almost all mean."""
    far = _extreme(rows, lambda row: 1 / max(1 - row.numbers["shift"], 1e-30), *CONSTANT)
    if not far:
        return []
    severity, first, worst = far
    text = f"{_exact_percent(first.numbers['shift'])} of the mean square is a constant: the units hardly vary"
    text += f" ({_exact_percent(worst.numbers['shift'])} at {worst.label})" if worst is not first else ""
    return [Finding(severity, "shift", first.label, text, f"{INIT}, {NORMALIZE}", worst.numbers["shift"])]


def _gradient(rows: list[ReportRow], ratio: float | None) -> list[Finding]:
    if not ratio:
        return []
    kind = "explode" if ratio > 1 else "vanish"
    severity = _graded(max(ratio, 1 / ratio), *GRADIENT)
    if severity is None:
        return []
    with_gradient = [row for row in rows if "gradient" in row.numbers]
    last = with_gradient[-1].label
    text = f"gradients {kind}: at the first layer they are {ratio:{NUMBER}} times those at the last ({last})"
    return [Finding(severity, kind, with_gradient[0].label, text, f"{INIT}, {NORMALIZE}", ratio)]


def _saturation(row: ReportRow) -> list[Finding]:
    share = row.numbers.get("saturated", 0.0)
    severity = _graded(share, *SATURATED)
    if severity is None:
        return []
    size = f"std has {_change(row.growth)} the input; " if row.growth is not None else ""
    text = (
        f"{size}outputs of {share:.0%} of its units saturate (in the flat part {row.numbers['flat']:.0%} of the time)"
    )
    advice = f"make its input smaller: {INIT}, {NORMALIZE}"
    return [Finding(severity, "saturated", row.label, text, advice, share)]


def _change(growth: float) -> str:
    return f"grown to {growth:{NUMBER}} times" if growth > 1 else f"shrunk to {growth:{NUMBER}} times"


def _rectifier(row: ReportRow) -> list[Finding]:
    found = []
    dead, always = row.numbers.get("dead", 0.0), row.numbers.get("always_on", 0.0)
    if dead:
        text = f"{_at_least(dead)} of its units are dead: they are on less than once in a thousand times"
        advice = f"raise the biases before it, {INIT}, {NORMALIZE}"
        found.append(Finding(_graded(dead, *DEAD) or "note", "dead", row.label, text, advice, dead))
    if always:
        text = f"{_at_least(always)} of its units are always on: for them the rectifier does nothing"
        advice = f"lower the biases before it, {INIT}"
        severity: Severity = "warning" if always >= ALWAYS_ON else "note"
        found.append(Finding(severity, "always_on", row.label, text, advice, always))
    return found


def _at_least(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _exact_percent(share: float) -> str:
    """Close to the whole the digits that count are those after the nines."""
    missing = (1 - share) * 100
    return f"{100 - missing:.6g} %" if missing > 1e-4 else "all"


def _constant(rows: list[ReportRow], weighted: list[ReportRow]) -> list[Finding]:
    """Units that do not vary: whole layers, and single channels of layers with weights."""
    whole = [row for row in rows if row.std.most == 0 and "dead" not in row.numbers]
    some = [row for row in weighted if 0 < row.constant < 1]
    advice = "look for rows of zeros in its weights, or for units before it that are dead"
    found = [
        Finding(
            "warning",
            "constant",
            row.label,
            f"{_at_least(row.constant)} of its units do not vary",
            advice,
            row.constant,
        )
        for row in some
    ]
    return found + ([_nothing_varies(whole[0], rows, weighted)] if whole else [])


def _nothing_varies(row: ReportRow, rows: list[ReportRow], weighted: list[ReportRow]) -> Finding:
    """Bad where the output is constant with it; a last layer or a branch may start at zero on purpose."""
    if row.label == weighted[-1].label:
        text = "none of its units varies: the output starts at zero, and nothing before it gets a gradient at first"
        return Finding("note", "constant", row.label, text, "leave it if that is on purpose", 1.0)
    severity: Severity = "error" if rows[-1].std.most == 0 else "warning"
    advice = "look for zeros in its weights, or for a layer before it that is dead"
    return Finding(severity, "constant", row.label, "none of its units varies", advice, 1.0)


def _disagreement(row: ReportRow, alike: bool) -> list[Finding]:
    """The measured std tells a different story than the analytic one; `alike`: positions were taken as such."""
    seen = row.measured.get("std")
    own = row.numbers["std"]
    if not seen or not seen["value"] or not own or row.kind != "module":
        return []
    ratio = own / seen["value"]
    if 2 / 3 < ratio < 3 / 2 or abs(own - seen["value"]) < 4 * seen["error"]:
        return []
    text = (
        f"the analytic std is {ratio:{NUMBER}} times the measured one ({seen['value']:{NUMBER}} +- {seen['error']:.1g})"
    )
    advice = "trust the measured numbers of this layer"
    if alike:
        advice += ", or keep positions apart: moments of every element, --positions on the command line"
    return [Finding("note", "disagreement", row.label, text, advice, ratio)]


def _approximations(rows: list[ReportRow]) -> list[Finding]:
    back = [row for row in rows if row.gradient_reason]
    sampled = [row for row in rows if row.status == "sampled"]
    found = []
    if back:
        text = f"{back[-1].gradient_reason} ({len(back)} place(s)): gradient scales before it are approximate"
        advice = 'compare with check="gaussian"'
        found.append(Finding("note", "backward", back[-1].label, text, advice, float(len(back))))
    if sampled:
        text = f"{len(sampled)} operation(s) without a rule were estimated by sampling"
        advice = "write a rule with @vp.rule"
        found.append(Finding("note", "sampled", sampled[0].label, text, advice, float(len(sampled))))
    return found
