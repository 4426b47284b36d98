"""What the inspector says of models that are known to train, freshly built: warnings and errors are false alarms."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import varprop as vp

from .inputs import described, drawn, moments
from .models import ROOT, build

Record = dict[str, Any]
RESULTS = ROOT / "docs/results/findings.json"
JUDGE = ("roles.py", "findings.py")  # what decides on a finding
# True alarms: chains without normalization in PyTorch's own initialization, a model cut too narrow for its own, and a
# signal scaled down below the epsilon of the norms behind it.
EXPECTED = {
    "torchvision/alexnet": "PyTorch's default initialization in a chain of 8 layers",
    "torchvision/raft_small": "the tanh of a context encoder of 20 convolutions without normalization",
    "basic/paper_mnist_mlp": "PyTorch's default initialization in a chain of 7 logistic layers",
    "basic/paper_cifar_cnn": "PyTorch's default initialization in a chain of 9 convolutions",
    "timm/mobilenetv5_base": "layer scales of 1e-5 also in the three blocks without a skip",
    "hf/whisper": "cut to 128 channels, with the weights' std of 384 and more",
}


def stamp() -> Record:
    """By which judge a record was made, and when: a fingerprint of the sources that decide, and the date (UTC)."""
    package = Path(vp.__file__).parent / "inspection"
    sources = b"".join((package / name).read_bytes() for name in JUDGE)
    now = datetime.datetime.now(datetime.UTC)
    return {"judge": hashlib.sha256(sources).hexdigest()[:8], "judged": f"{now:%Y-%m-%d}"}


def study(model_name: str) -> Iterator[Record]:
    """The findings on one model as a user would call for them."""
    model, inputs = build(model_name)
    record: Record = {"model": model_name, "input": described(inputs)}
    try:
        report = vp.inspect(model, moments(inputs), example=drawn(inputs))
    except vp.VarpropError as error:
        yield record | {"status": type(error).__name__, "error": str(error).splitlines()[0]}
        return
    told = [(one.severity, one.kind, one.where, one.text) for one in report.findings]
    yield record | {"status": "done", "alarms": [one for one in told if one[0] != "note"]}


def said(record: Record) -> str:
    """A record in a few words."""
    return "; ".join(f"{severity} {kind} at {where}" for severity, kind, where, _ in record["alarms"]) or "nothing"


def committed() -> tuple[dict[str, Record], dict[str, Record]]:
    """The records in docs/results/findings.json by model: of sound models, and of damaged ones."""
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    sound, damaged = ({r["model"]: r for r in records if ("damages" in r) == broken} for broken in (False, True))
    return sound, damaged


def newest(known: dict[str, Record], found: dict[str, Record]) -> dict[str, Record]:
    """What was found beside what was known; a model that was not finished this time keeps what it was told before."""
    told = {name for name, one in known.items() if one["status"] == "done"}
    return known | {name: one for name, one in found.items() if one["status"] == "done" or name not in told}


def write(alarms: list[Record], damages: list[Record]) -> None:
    """The results as JSON, and the tables for docs/inspector.md on standard output."""
    lines = [
        json.dumps({key: value for key, value in record.items() if key != "total_s"}) for record in (*alarms, *damages)
    ]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print("\n".join([*_alarm_table(alarms), "", *_judged(alarms), "", *_damage_table(damages)]))


def _judged(records: list[Record]) -> Iterator[str]:
    """How many were judged by the judge as it is now, and which were not."""
    done = [record for record in records if record["status"] == "done"]
    earlier = [record["model"] for record in done if record.get("judge") != stamp()["judge"]]
    yield f"{len(done) - len(earlier)} of {len(done)} by the present judge ({stamp()['judge']})."
    if earlier:
        yield f"By an earlier one: {', '.join(earlier)}."


def _alarm_table(records: list[Record]) -> Iterator[str]:
    groups = dict.fromkeys(record["model"].partition("/")[0] for record in records)
    yield from (
        "| group | inspected | with warnings or errors | with errors | which, and why |",
        "|---|---|---|---|---|",
    )
    for group in (*groups, "all"):
        own = [
            record
            for record in records
            if record["status"] == "done" and group in (record["model"].partition("/")[0], "all")
        ]
        alarmed = [record for record in own if record["alarms"]]
        errors = [record for record in own if any(alarm[0] == "error" for alarm in record["alarms"])]
        why = [
            f"{record['model'].partition('/')[2]}: {EXPECTED.get(record['model'], said(record))}" for record in alarmed
        ]
        counts = len(own), len(alarmed), len(errors)
        yield f"| {group} | {' | '.join(map(str, counts))} | {'; '.join(why) if group != 'all' else ''} |"


def _damage_table(records: list[Record]) -> Iterator[str]:
    yield from ("| damage | found on, as |", "|---|---|")
    for name in dict.fromkeys(name for record in records for name in record["damages"]):
        tried = {record["model"]: record["damages"][name] for record in records if name in record["damages"]}
        found = [f"{model} ({', '.join(kinds) or 'not found'})" for model, kinds in tried.items()]
        yield f"| {name} | {', '.join(found)} |"
