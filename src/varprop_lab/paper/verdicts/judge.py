"""The paper's claims against the outcomes: each a small function from runs to a verdict with its numbers.

How a verdict comes about is said by `RULE`, which stands below the verdicts. What has not been run is never guessed:
the verdict is ``no data``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from varprop.text_table import Table

from ...environment import write_atomically
from ...protocol import PAPER_LR_MAX
from ...store import Run
from ..experiments import EXPERIMENTS
from . import batch_norm, comparisons, training  # noqa: F401  (their claims register themselves)
from .evidence import REGISTERED, Claim, Evidence, judged

RULE = (
    "Runs are compared seed by seed. A difference counts only when zero lies outside the 95 % interval of Student's "
    "t for the mean of the differences; with fewer than two seeds in common nothing counts. A threshold is passed "
    "when every seed passes it, and failed when every seed fails it. So more seeds decide more differences and make "
    "thresholds harder to pass. Whatever is not decided by this is within noise. A claim of several parts holds when "
    "all of them hold, and does not hold when one of them fails at the 5 % level divided by the number of parts. "
    "docs/results/verdict_rates.md says how often a claim fails or holds where there is no difference at all. "
    "A limit is kept 'with the noise to spare' when the interval lies entirely below it. "
    "Numbers are mean ± standard deviation over seeds."
)
# In the order of the paper: background, advantages, lengths of steps, MNIST, with noise, conclusion.
_ORDER = """
bn-recurrent bn-overhead bn-stochastic bn-batch-size-training bn-batch-size-validation
overhead-wn overhead overhead-bn image-size ap2-batch-size-training ap2-batch-size-validation recurrent
four-times four-times-adam equal-rates great-improvement search-undoes fair-is-closer
decay-nothing decay-destabilizes projection
running-matches hard-from-none bn-evaluation-early bn-evaluation-late bn-momentum all-from-bn
bn-evaluation-better-early bn-evaluation-better-late others-from-ap2 bn-oscillates bn-smaller-rate trains near-zero
near-zero-still overfits overfits-still bn-overfits-less bn-overfits-less-still bn-generalizes
bn-generalizes-still noise-prevents on-par cifar-close cifar-bn-trains-best
cifar-comparable-training cifar-bn-validates-best cifar-comparable-validation bn-boost
robust lower-loss lower-loss-evaluation bn-unstable orthogonal
"""
CLAIMS = tuple(REGISTERED[name] for name in _ORDER.split())


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim."""

    name: str
    claim: str  # the paper's sentence
    verdict: str  # ``holds``, ``does not hold``, ``within noise`` or ``no data``
    rule: str  # how it was computed, in words
    measured: tuple[str, ...]  # the numbers behind it, with their spread
    figure: str  # ``experiment/figure`` that bears on it
    setting: str = ""  # the bound on the learning rate it is about, or the rate itself
    others: tuple[Verdict, ...] = ()  # the same claim at other bounds that were run


def judge(runs: Sequence[Run], benchmarks: Sequence[Path] = ()) -> list[Verdict]:
    """All claims, in the order of the paper; experiments that are missing give ``no data``.

    The measured overhead is read from the first of the benchmarks' files that exists.
    """
    return [judge_claim(claim, runs, benchmarks) for claim in CLAIMS]


def judge_claim(claim: Claim, runs: Sequence[Run], benchmarks: Sequence[Path] = ()) -> Verdict:
    """The verdict at the paper's bound on the learning rate, and beside it those at other bounds."""
    # A folder of another name than its experiment holds the same cells with other settings, which are not meant.
    outcomes = tuple(outcome for run in runs for outcome in run.select(experiment=run.experiment))
    bounds = sorted({o.cell.lr_max for o in outcomes if o.cell.experiment in claim.experiments})
    by_bound: dict[float | None, Verdict] = {}
    for bound in bounds or (None,):
        finding = judged(claim.judge, Evidence(outcomes, bound, benchmarks))
        setting = "" if bound is None else f"lr {'≤' if EXPERIMENTS[claim.experiments[0]].search else '='} {bound:g}"
        by_bound[bound] = Verdict(
            claim.name, claim.text, str(finding.verdict), claim.rule, finding.measured, claim.figure, setting
        )
    main = min(by_bound, key=lambda bound: (not math.isclose(bound or 0.0, PAPER_LR_MAX), bound or 0.0))
    return replace(by_bound[main], others=tuple(verdict for bound, verdict in by_bound.items() if bound != main))


def write(verdicts: Sequence[Verdict], out: Path) -> list[Path]:
    """Writes ``claims.json`` and ``claims.md``."""
    as_json = json.dumps(
        {"rule": RULE, "claims": [asdict(verdict) for verdict in verdicts]}, indent=1, ensure_ascii=False
    )
    write_atomically(out / "claims.json", f"{as_json}\n".encode())
    write_atomically(out / "claims.md", markdown(verdicts).encode())
    return [out / "claims.json", out / "claims.md"]


def markdown(verdicts: Sequence[Verdict], link: Callable[[str], str] = lambda figure: figure) -> str:
    """The table of claims as Markdown; `link` gives the address of a figure ``experiment/figure``, empty for none."""
    columns = ("claim", "verdict", "measured", "figure")
    table = Table("", columns, [_row(verdict, link) for verdict in verdicts], left=columns).markdown()
    how = "".join(f"- {escaped(verdict.claim)}: {escaped(verdict.rule)}\n" for verdict in verdicts)
    return f"{table}\n\n{escaped(RULE)}\n\nHow each verdict is computed:\n\n{how}"


def _row(verdict: Verdict, link: Callable[[str], str]) -> tuple[str, ...]:
    verdicts = "<br>".join(
        [f"**{verdict.verdict}**", *(f"{beside.setting}: {beside.verdict}" for beside in verdict.others)]
    )
    measured = "<br>".join(map(escaped, verdict.measured))
    address = link(verdict.figure) if verdict.figure else ""
    figure = f"[{verdict.figure}]({address})" if address and address != verdict.figure else verdict.figure
    return escaped(verdict.claim), verdicts, measured, figure


def escaped(text: str) -> str:
    """Text that Markdown leaves alone inside a table."""
    result = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
    return " ".join(result.split())
