"""The paper's claims against the outcomes: each a small function from runs to a verdict with its numbers.

How a verdict comes about. A *difference* counts only when it is larger than twice the standard deviation that the
difference of two single runs has over seeds (`spread`). A *threshold* is passed when every seed passes it, failed when
every seed fails it, and undecided otherwise. A claim of several parts holds when all parts hold, does not hold when one
of them does not, and is within noise otherwise. What has not been run is never guessed: the verdict is ``no data``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .claims import CLAIMS, Claim
from .gather import Run
from .layout import PAPER_BATCH, PAPER_BOUND
from .overhead import overhead
from .readings import Evidence
from .store import write_atomically

RULE = (
    "A difference counts only when it is larger than twice the standard deviation that the difference of two single "
    "runs has over seeds, 2 sqrt(s_a² + s_b²). Where one side has a single seed, the other's spread stands for both; "
    "where both have, nothing counts. A threshold is passed when every seed passes it, and failed when every seed "
    "fails it. Whatever is not decided so is within noise. Numbers are mean ± standard deviation over seeds."
)


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one claim.

    Attributes:
        name: A short name.
        claim: The paper's sentence.
        verdict: ``holds``, ``does not hold``, ``within noise`` or ``no data``.
        rule: How it was computed, in words.
        measured: The numbers behind it, with their spread.
        figure: ``experiment/figure`` that bears on it.
        setting: The bound on the learning rate it is about, or the rate itself.
        others: The same claim at other bounds that were run.
    """

    name: str
    claim: str
    verdict: str
    rule: str
    measured: tuple[str, ...]
    figure: str
    setting: str = ""
    others: tuple[Verdict, ...] = ()


def judge(runs: Sequence[Run], benchmarks: Sequence[Path] = ()) -> list[Verdict]:
    """All claims, in the order of the paper.

    Args:
        runs: What was found; experiments that are missing give ``no data``.
        benchmarks: Where the measured overhead may lie; the first file that exists is read.
    """
    return [*(judge_claim(claim, runs) for claim in CLAIMS), overhead_verdict(benchmarks)]


def judge_claim(claim: Claim, runs: Sequence[Run]) -> Verdict:
    """The verdict at the paper's bound on the learning rate, and beside it those at other bounds."""
    by_bound = {bound: verdict_at(claim, runs, bound) for bound in bounds_of(claim, runs)}
    if not by_bound:
        return verdict_at(claim, runs, None)
    main = min(by_bound, key=lambda bound: (not math.isclose(bound, PAPER_BOUND), bound))
    return replace(by_bound[main], others=tuple(verdict for bound, verdict in by_bound.items() if bound != main))


def bounds_of(claim: Claim, runs: Sequence[Run]) -> list[float]:
    """The bounds that the experiments of a claim were run with."""
    outcomes = [outcome for run in runs if run.experiment in claim.experiments for outcome in run.outcomes]
    return sorted({outcome.cell.lr_max for outcome in outcomes if outcome.cell.batch_size == PAPER_BATCH})


def verdict_at(claim: Claim, runs: Sequence[Run], bound: float | None) -> Verdict:
    """A claim judged on the runs of one bound, with the paper's batch size."""
    chosen = [o for run in runs for o in run.outcomes if o.cell.lr_max == bound and o.cell.batch_size == PAPER_BATCH]
    reading = claim.read(Evidence(tuple(chosen)))
    setting = "" if bound is None else f"lr {'=' if claim.fixed else '≤'} {bound:g}"
    return Verdict(claim.name, claim.text, reading.verdict, claim.rule, reading.measured, claim.figure, setting)


def overhead_verdict(benchmarks: Sequence[Path]) -> Verdict:
    """What a training step costs, from the file of the benchmark."""
    reading, rule = overhead(benchmarks)
    text = "The proposed normalization has little overhead: no more than batch normalization"
    return Verdict("overhead", text, reading.verdict, rule, reading.measured, "")


def write(verdicts: Sequence[Verdict], out: Path) -> list[Path]:
    """Writes ``claims.json`` and ``claims.md``."""
    as_json = json.dumps(
        {"rule": RULE, "claims": [asdict(verdict) for verdict in verdicts]}, indent=1, ensure_ascii=False
    )
    write_atomically(out / "claims.json", f"{as_json}\n".encode())
    write_atomically(out / "claims.md", markdown(verdicts).encode())
    return [out / "claims.json", out / "claims.md"]


def markdown(verdicts: Sequence[Verdict], link: Callable[[str], str] = lambda figure: figure) -> str:
    """The table of claims as Markdown.

    Args:
        verdicts: To be listed.
        link: Gives the address of a figure named ``experiment/figure``, empty for none.
    """
    head = "| claim | verdict | measured | figure |\n|---|---|---|---|\n"
    rows = "".join(markdown_row(verdict, link) for verdict in verdicts)
    how = "".join(f"- {plain(verdict.claim)}: {plain(verdict.rule)}\n" for verdict in verdicts)
    return f"{head}{rows}\n{plain(RULE)}\n\nHow each verdict is computed:\n\n{how}"


def markdown_row(verdict: Verdict, link: Callable[[str], str]) -> str:
    """One claim."""
    verdicts = "<br>".join(
        [f"**{verdict.verdict}**", *(f"{other.setting}: {other.verdict}" for other in verdict.others)]
    )
    measured = "<br>".join(map(plain, verdict.measured))
    address = link(verdict.figure) if verdict.figure else ""
    figure = f"[{verdict.figure}]({address})" if address and address != verdict.figure else verdict.figure
    return f"| {plain(verdict.claim)} | {verdicts} | {measured} | {figure} |\n"


def plain(text: str) -> str:
    """Text that Markdown leaves alone inside a table."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
    return " ".join(escaped.split())
