"""Findings on a network in plain words, the worst first, with what to do about them; and how two states differ."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .measure import Estimates
from .rows import ReportRow

GROWN = 10.0, 1e3  # std over the input's: a residual stream of 36 blocks has 6; 1000 is near float16's end
SHRUNK = 30.0, 1e4  # timm's VGG-11 ends at 22; AlexNet, in PyTorch's own initialization, at 320 and trains
CONSTANT = 100.0, 1e4  # mean square over variance: AlexNet ends at 114; 10^4 is lost in the 8 bits of bfloat16
GRADIENT = 1e3, 1e4  # first over last layer: ResNet-50 has 450 in training mode; across 10^4 no learning rate serves
SATURATED = 0.1, 0.5  # share of units: a gate may hold some of them on purpose, but not half a layer
DEAD = 0.5, 0.6  # share of units
ALWAYS_ON = 0.5  # share of units: the rectifier is none for them, which costs but does not break, so never an error
STANDARD_ERRORS = 2.5  # more dead than always on: SqueezeNet has 52 % and 31 % of 48 units as published, and trains
RANKS, RANK = 4, (3.0, 2.0)  # ranks a weight could have at least, over the effective one at least, which is below 2
BRANCH = 30.0, 1e3  # std of what is added to a residual stream over that of the stream
# std out over std in of a layer: He's initialization has 1.4, and BERT's 0.3. From the first number on a layer may make
# its branch too large, if that is 20 times what layers of the network usually have; from the second on in any network.
AMPLIFIES = 10.0, 20.0
DISAGREEMENT = 1.5, 2.0  # computed std over the measured one, or its inverse: a note, and a warning
DEPENDENT = 1.5  # std on a few random inputs over the computed one, or its inverse
PREDICTION = 5.0  # by how much predictions may be larger than other values: logits of trained classifiers have 20


Severity = Literal["error", "warning", "note"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
NOTHING_FOUND = "Nothing to worry about was found."


def times(factor: float) -> str:
    """A factor as people write it: "2.4 times", "12,000 times", "1/30 of"; two digits."""
    if not math.isfinite(factor) or factor == 0:
        return f"{factor:.3g} times"
    if 0.5 < factor < 1:
        return f"{factor:.2g} times"
    size = factor if factor >= 1 else 1 / factor
    rounded = float(f"{size:.2g}")
    text = f"{size:.0e}" if rounded >= 1e9 else f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"
    return f"{text} times" if factor >= 1 else f"1/{text} of"


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        severity: ``error``, ``warning`` or ``note``.
        kind: What it is about, for programs: growth, decay, saturated, dead, always_on, shift, gradient, ...
        where: Label of the row it was found at.
        text: A sentence.
        advice: What to do about it.
        value: The number behind it.
    """

    severity: Severity
    kind: str
    where: str
    text: str
    advice: str
    value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.text} -> {self.advice}."


ARGUMENTS = "model, moments"
MEASURE = f"measure on data: vp.inspect({ARGUMENTS}, check=data)"
GRADIENTS = ("explode", "vanish")
CAUSES = ("constant", "rank")  # kinds that others may follow from
INIT = f"initialize by vp.init_({ARGUMENTS})"
REMEDY = f"{INIT}, or train with vp.normalize({ARGUMENTS})"
NAMED = 4  # layers that one finding names
OFF_PATH = ("branch", "in branch", "gate", "data")  # roles of what lies beside the way of the signal, or before it
ASIDE = ("normalized", "query", "head", "token", *OFF_PATH)  # and of what else may be small or nearly constant


@dataclass(frozen=True)
class FindingContext:
    """Everything beside the rows that findings depend on."""

    unsettled: int  # how many batch norms have seen no data
    arguments: str  # those of the calls that are advised
    check: Any  # what the numbers were measured on: None, ``"gaussian"`` or data
    measured_input_std: float  # standard deviation of the inputs on which they were measured
    input_std: float  # the one that the moments of the input have
    gradients: Callable[[], list[Estimates]]  # runs the trial again with gradients, where a finding rests on them
    untried: bool  # the model could not be run on random inputs


def findings(rows: list[ReportRow], context: FindingContext) -> tuple[Finding, ...]:
    """All findings: errors first, causes before what follows from them, in the order of the network.

    Numbers that were measured on data decide. Without data a warning or an error has to stand on the random inputs of
    the trial too: it is a note otherwise, since trained units are far from independent.
    """
    if context.check is not None:
        result = _judgement(_with(rows, [row.measured for row in rows], context.measured_input_std))
    else:
        result = _judgement(rows)
        if any(row.trial for row in rows) and any(finding.severity != "note" for finding in result):
            trial = [row.trial for row in rows]
            if any(finding.kind in GRADIENTS and finding.severity != "note" for finding in result):
                trial = context.gradients() or trial
            result = _confirmed(result, _judgement(_with(rows, trial, context.input_std)))
    if new := context.unsettled:
        text = f"{new} batch norm(s) have seen no data: they are taken as in training, by the statistics of the batch"
        advice = "load the weights if there are some"
        result.append(Finding("note", "unsettled", "(model)", text, advice, float(new)))
    result += [*_disagreement(rows, context), *_dependence(rows)]
    if context.untried:
        text = "the model could not be run on random inputs: findings rest on the assumption of independent units"
        result.append(Finding("note", "untried", "(model)", text, MEASURE, 1.0))
    result += _approximations([row for row in rows if row.is_layer], context.check is not None)
    result = [replace(finding, advice=_advice(finding, rows, context)) for finding in result]
    return tuple(sorted(result, key=lambda finding: (ORDER[finding.severity], finding.kind not in CAUSES)))


def _judgement(rows: list[ReportRow]) -> list[Finding]:
    """Findings that follow from the numbers of the rows, computed or measured."""
    layers = [row for row in rows if row.is_layer]
    # a pool or a gate may be small or nearly constant with good reason, what a layer passes to a nonlinearity not
    weighted = [row for row in layers if row.weighted and row.role != "gate"] or layers
    weighted_ids = {id(row) for row in weighted}
    path = [row for row in layers if id(row) in weighted_ids or row.role == "stream"]
    data = next((row.growth for row in reversed(layers) if row.role == "data" and row.growth), 1.0)
    result = [*_constant(layers, weighted), *_rank(layers)]
    result += [*_growth(layers, path, max(1.0, data)), *_branches(layers), *_gradient(rows)]
    result += _decay(_judged([row for row in path if row is not weighted[-1]], weighted), min(1.0, data))
    cause = next((finding.where for finding in result if finding.kind == "constant" and finding.value == 1.0), None)
    if cause is not None:  # nothing more is said of a constant layer, and of what does not vary behind it
        index = [row.label for row in layers].index(cause)
        follows = {id(row) for row in layers[index:] if row.std.most == 0}
        layers, weighted = ([row for row in some if id(row) not in follows] for some in (layers, weighted))
    result += _shift(_judged(weighted[:-1] or weighted, weighted))
    for row in layers:
        result += _softened(row, [*_saturation(row), *_rectifier(row)])
    dead = {finding.where for finding in result if finding.kind == "dead" and finding.value == 1.0}
    if cause is not None and _constant_before(cause, rows) & dead:  # the layer is constant because it reads zeros
        result = [finding for finding in result if (finding.kind, finding.where) != ("constant", cause)]
    return list(_merged(result))


def _constant_before(label: str, rows: list[ReportRow]) -> set[str]:
    """The layers right before one, up to the last that varies."""
    layers = [row for row in rows if row.is_layer]
    before = reversed(layers[: [row.label for row in layers].index(label)])
    return {row.label for row in itertools.takewhile(lambda row: row.std.most == 0, before)}


def _with(rows: list[ReportRow], estimates: list[Estimates], input_std: float) -> list[ReportRow]:
    """The rows with measured numbers in place of computed ones, as far as there are any."""
    changed = []
    for row, seen in zip(rows, estimates, strict=True):
        values = {name: estimate["value"] for name, estimate in seen.items() if math.isfinite(estimate["value"])}
        numbers = {**row.numbers, **{name: value for name, value in values.items() if name in row.numbers}}
        growth = row.growth
        if growth is not None and "std" in values and input_std:
            growth = values["std"] / input_std
        total, single = row.gradient_total, row.numbers.get("gradient")
        if total is not None and single and "gradient" in values:
            total = total * values["gradient"] / single
        changed.append(replace(row, numbers=numbers, growth=growth, gradient_total=total))
    return changed


def _confirmed(findings: list[Finding], on_trial: list[Finding]) -> list[Finding]:
    """Warnings and errors that the trial has too, in the milder severity of both; the others become notes."""
    seen: dict[str, Severity] = {}
    for finding in on_trial:
        if finding.severity != "note":
            seen[finding.kind] = min(finding.severity, seen.get(finding.kind, "warning"), key=ORDER.__getitem__)
    confirmed = []
    for finding in findings:
        if finding.severity == "note" or finding.kind in seen:
            severity = max(finding.severity, seen.get(finding.kind, finding.severity), key=ORDER.__getitem__)
            confirmed.append(replace(finding, severity=severity))
        else:
            text = f"{finding.text}; but not on random inputs: its units are far from independent"
            confirmed.append(replace(finding, severity="note", text=text, advice=MEASURE))
    return confirmed


def _advice(finding: Finding, rows: list[ReportRow], context: FindingContext) -> str:
    """The advice of a finding with the arguments of the call; `vp.init_` refuses weights that are all zero."""
    advice, zeros = finding.advice, [row.weight for row in rows if row.rank == 0.0 and row.weight]
    if zeros and INIT in advice:
        fill = f"fill the zeros of {', '.join(zeros[:NAMED])} (torch.nn.init.kaiming_normal_), then "
        advice = advice.replace(REMEDY, INIT).replace(INIT, fill + INIT)
    return advice.replace(f"({ARGUMENTS}", f"({context.arguments}")


def _judged(rows: list[ReportRow], weighted: list[ReportRow]) -> list[ReportRow]:
    """The rows that may not be small or nearly constant.

    A layer that may be in one of its calls may be in all, by the same weights: one that refines its prediction, say.
    """
    excused = {row.path for row in weighted if row.kind == "module" and row.role in ASIDE}
    return [row for row in rows if row.role not in ASIDE and row.path not in excused]


def _merged(findings: list[Finding]) -> Iterator[Finding]:
    """Errors one by one; of several warnings or notes of one kind the worst, which names the others."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    for (severity, _), group in groups.items():
        if severity == "error" or len(group) == 1:
            yield from group
        else:
            worst = max(group, key=lambda finding: finding.value)
            places = _listed([finding.where for finding in group])
            yield replace(worst, text=f"{worst.text} (the most of {len(group)} such layers: {places})")


def _listed(places: list[str]) -> str:
    """The first places, and whether there are more."""
    return ", ".join(places[:NAMED]) + (", ..." if len(places) > NAMED else "")


def _graded(value: float, warning: float, error: float) -> Severity | None:
    return "error" if value >= error else "warning" if value >= warning else None


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
    rows = [*(row for row in layers if row.op == "embedding"), *path]
    judged = [row for row in rows if row.role not in ("normalized", "data")]

    def size(row: ReportRow) -> float:  # predictions of a trained network are larger than what its layers pass on
        return _grown(row) / prepared / (PREDICTION if row.role == "head" else 1.0)

    for severity, first, worst in _extreme(judged, size, GROWN):
        if first.growth is not None:
            yield _of_size("growth", "grown", severity, first, worst)
        else:
            text = f"std is {_grown(first):.3g}, and should be about 1 behind an embedding of tokens"
            text += f", and reaches {_grown(worst):.3g} at {worst.label}" if worst is not first else ""
            yield Finding(severity, "growth", first.label, text, "make embeddings or weights smaller", _grown(worst))


def _grown(row: ReportRow) -> float:
    """The std over that of the input; tokens have none, and count as 1."""
    return row.numbers["std"] if row.growth is None else row.growth


def _decay(rows: list[ReportRow], prepared: float) -> Iterator[Finding]:
    """Where decay of the standard deviation begins, and how far it goes; an untrained last layer may be small."""
    for extreme in _extreme(rows, lambda row: prepared / row.growth if row.growth else 0.0, SHRUNK):
        yield _of_size("decay", "shrunk", *extreme)


def _of_size(kind: str, verb: str, severity: Severity, first: ReportRow, worst: ReportRow) -> Finding:
    text = f"std has {verb} to {times(first.growth or 0.0)} that of the input"
    text += f", and reaches {times(worst.growth or 0.0)} it at {worst.label}" if worst is not first else ""
    return Finding(severity, kind, first.label, text, REMEDY, worst.growth or 0.0)


def _softened(row: ReportRow, findings: Iterable[Finding]) -> Iterator[Finding]:
    """No warning, though an error, where units are as they are by design.

    Averages hardly vary, so that units of a gate are on, off or flat by their mean. What is rectified already is not
    cut a second time where a small branch has been added to it.
    """
    for finding in findings:
        by_design = row.role == "gate" or (row.role == "rectified stream" and finding.kind == "always_on")
        yield replace(finding, severity="note") if by_design and finding.severity == "warning" else finding


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
    kept = {id(row) for row in largest.values()}
    judged = [row for row in layers if id(row) in kept]
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
            severity = "warning" if severity == "error" else "note"
        text = f"gradients {kind}: at the first layer they are {times(ratio)} those at the last ({ends[1].label})"
        # behind vp.normalize gradients of a deep chain grow too: scales and shifts learn, but start as for any depth
        advice = f"{INIT}; where that is not enough, add skip connections"
        yield Finding(severity, kind, ends[0].label, text, advice, ratio)


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
    constant = next((row for row in rows if row.std.most == 0 and "dead" not in row.numbers), None)
    last = constant is not None and constant.label == weighted[-1].label
    if constant is not None and last and (constant.rank == 0.0 or constant.mean.most == constant.mean.least == 0):
        text = "none of its units varies: the output starts at zero, and nothing before it gets a gradient at first"
        yield Finding("note", "constant", constant.label, text, "leave it if that is on purpose", 1.0)
    elif constant is not None:
        advice = "look for zeros in its weights, biases that saturate it, or a layer before it that is dead"
        if constant.rank == 0.0:
            advice = f"give {constant.weight or 'its weights'} values (torch.nn.init.kaiming_normal_): all are zero"
        severity: Severity = "error" if rows[-1].std.most == 0 else "warning"
        yield Finding(severity, "constant", constant.label, "none of its units varies", advice, 1.0)


def _rank(rows: list[ReportRow]) -> Iterator[Finding]:
    """Weights that are nearly of rank one: all units of the layer are the same but for their size."""
    for row in rows:
        if row.rank and row.full_rank >= RANKS and row.full_rank / row.rank >= RANK[0] and row.rank < RANK[1]:
            severity: Severity = "warning" if row.role in (*OFF_PATH, "query", "head") else "error"
            text = f"its weight has an effective rank of {row.rank:.2g} of {row.full_rank}: its units hardly differ"
            advice = f"give {row.weight or 'it'} new values (torch.nn.init.kaiming_normal_)"
            yield Finding(severity, "rank", row.label, text, advice, row.full_rank / row.rank)


def _branches(rows: list[ReportRow]) -> Iterator[Finding]:
    """Residual branches that drown the stream which they are added to, whatever its scale.

    A normalization behind every sum hides that: branches that start at 1/30 of their stream, as those of BERT, are 3
    times as large as it after a factor of 100. So what is larger than its stream counts too where the layer that makes
    it multiplies the signal by far more than the layers of this network do.
    """
    advice = "make the last weights of the branch smaller"
    for severity, first, worst in _extreme(rows, lambda row: row.branch or 0.0, BRANCH):
        text = f"what is added to the residual stream is {times(first.branch or 0.0)} as large as the stream"
        text += f" ({times(worst.branch or 0.0)} at {worst.label})" if worst is not first else ""
        yield Finding(severity, "branch", first.label, text, advice, worst.branch or 0.0)
    gains = [row.gain for row in rows if row.weighted and row.gain]
    usual = statistics.median_low(gains) if gains else 1.0
    limit = max(AMPLIFIES[0], AMPLIFIES[1] * min(1.0, usual))
    for row in rows:
        if row.branch and 1 < row.branch < BRANCH[0] and row.branch_gain and row.branch_gain >= limit:
            text = (
                f"what is added to the residual stream is {times(row.branch)} as large as the stream, by a "
                f"layer that multiplies the std by {row.branch_gain:.2g}, where others have {usual:.2g}"
            )
            yield Finding("warning", "branch", row.label, text, advice, row.branch)


def _disagreement(rows: list[ReportRow], context: FindingContext) -> Iterator[Finding]:
    """The layer whose computed std is furthest from the measured one, if that is far."""
    off: list[tuple[float, float, ReportRow]] = []
    for row in rows:
        seen, computed = row.measured.get("std"), row.numbers["std"]
        if row.kind == "module" and row.leaf and seen and seen["value"] and computed and math.isfinite(seen["value"]):
            ratio = computed / seen["value"]
            if max(ratio, 1 / ratio) >= DISAGREEMENT[0] and abs(computed - seen["value"]) >= 4 * seen["error"]:
                off.append((max(ratio, 1 / ratio), ratio, row))
    if not off:
        return
    factor, ratio, worst = max(off, key=lambda found: found[0])
    seen = worst.measured["std"]
    text = f"the computed std is {times(ratio)} the measured one ({seen['value']:.3g} +- {seen['error']:.1g})"
    if len(off) > 1:
        text += f", the most of {len(off)} such layers: {_listed([row.label for *_, row in off])}"
    inputs = context.measured_input_std / context.input_std if context.input_std and context.measured_input_std else 1.0
    if not 2 / 3 < inputs < 3 / 2:
        advice = f"the data has {times(inputs)} the std that was given: pass vp.input_moments(data)"
    else:
        advice = "trust the measured numbers, by which the findings are judged"
        if any(any(row.uniform[2:]) for row in rows):
            advice += ", or keep positions apart: moments of every element, --positions on the command line"
    severity: Severity = "warning" if factor >= DISAGREEMENT[1] else "note"
    yield Finding(severity, "disagreement", worst.label, text, advice, factor)


def _dependence(rows: list[ReportRow]) -> Iterator[Finding]:
    """The layer where the trial is furthest from the computed std, if that is far: units are not independent there."""
    off = [(max(ratio, 1 / ratio), row) for row in rows if row.is_layer and (ratio := row.trial_ratio)]
    off = [pair for pair in off if pair[0] >= DEPENDENT]
    if off:
        factor, worst = max(off, key=lambda pair: pair[0])
        text = (
            f"on random inputs the std is {times(worst.trial_ratio or 0.0)} the computed one, the most of {len(off)} "
            f"such layer(s): units are not independent, as after training"
        )
        yield Finding("note", "dependence", worst.label, text, MEASURE, factor)


def _approximations(rows: list[ReportRow], checked: bool) -> Iterator[Finding]:
    """Where gradients are approximate, and where values were sampled."""
    back = [row for row in rows if row.gradient_reason]
    sampled = [row for row in rows if row.status == "sampled"]
    if back:
        text = f"{back[-1].gradient_reason} ({len(back)} place(s)): gradient scales before it are approximate"
        other = "the measured ones" if checked else f'vp.inspect({ARGUMENTS}, check="gaussian")'
        yield Finding("note", "backward", back[-1].label, text, f"compare with {other}", float(len(back)))
    if sampled:
        text = f"{len(sampled)} operation(s) without a rule were estimated by sampling"
        yield Finding("note", "sampled", sampled[0].label, text, "write a rule with @vp.rule", float(len(sampled)))


NEITHER_FOUND = "Neither state has findings."


@dataclass(frozen=True)
class Differences:
    """Findings of two states."""

    new: tuple[Finding, ...]  # in the second state alone
    gone: tuple[Finding, ...]  # in the first state alone
    stayed: tuple[tuple[Finding, Finding], ...]  # in both, as pairs; severity, place and size may differ

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "new": [finding.to_dict() for finding in self.new],
            "gone": [finding.to_dict() for finding in self.gone],
            "stayed": [{"before": first.to_dict(), "after": second.to_dict()} for first, second in self.stayed],
        }


def differences(before: Sequence[Finding], after: Sequence[Finding]) -> Differences:
    """Pair findings of one kind and place, then those of one kind: each tells of its worst layer, which may move."""
    gone, new, stayed = list(before), list(after), list[tuple[Finding, Finding]]()
    for same in (("kind", "where"), ("kind",)):
        key = operator.attrgetter(*same)
        for finding in list(gone):
            match = next((candidate for candidate in new if key(finding) == key(candidate)), None)
            if match is not None:
                stayed.append((finding, match))
                gone.remove(finding)
                new.remove(match)
    ordered = sorted(stayed, key=lambda pair: ORDER[pair[1].severity])
    return Differences(tuple(new), tuple(gone), tuple(ordered))


def severity_change(pair: tuple[Finding, Finding]) -> str:
    """``stayed``, or ``worse`` or ``milder`` where the severity changed."""
    first, second = (ORDER[finding.severity] for finding in pair)
    return "stayed" if first == second else "worse" if second < first else "milder"
