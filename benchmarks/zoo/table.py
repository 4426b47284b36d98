"""The committed results: a golden file that tells one review from the next, and a page to read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .causes import GOOD, said
from .models import GROUPS, ROOT
from .normalized import beyond

GOLDEN, TIMES, PAGE = (ROOT / "docs" / name for name in ("results/zoo.json", "results/zoo_times.json", "zoo.md"))
Record = dict[str, Any]
DRAWN = "drawn"
CLASSIFICATION = "torchvision, classification"
REST = "torchvision, other"  # segmentation, video, optical flow
OTHER = ("deeplab", "fcn", "lraspp", "mc3", "mvit", "r2plus1d", "r3d", "raft", "s3d", "swin3d")
INTRODUCTION = """# The zoo

{total} public models with random weights, in evaluation mode. The sweep asks two things: does every operation on the
path of the random input have a rule, and how close are the standard deviations to Monte Carlo? It is made by

```
make zoo                                   # a .venv-zoo with all packages, the sweep, and this page
python -m benchmarks.zoo sweep MODEL ...   # some models, with whatever is installed
python -m benchmarks.zoo table             # this page and docs/results/zoo.json from what has been measured
```

on {machine}, with {versions}. A model that was not measured this time keeps its earlier result, from x86_64 or aarch64.

- *End to end*: captured and propagated without sampling.
- *Error*: the median over a model's layers of |std analytic / std Monte Carlo - 1|. Both are root mean squares over a
  layer's channels of the std over samples and positions, for a standard normal input (or tokens of equal probability)
  and {samples} samples.
- *Positions alike*: the input has one mean and variance for all positions of a channel (uniform axes), and so have all
  results. This takes a fraction of a second and treats borders only on average.
- *Positions apart*: the input's moments are given for every pixel; measured where the first error is above 10 %.

Inputs are small where the architecture allows it. Models of transformers, diffusers, monai and PyTorch Geometric are
small ones of their architecture, and plain vision transformers of timm have 4 blocks; all others have their published
size. Exact, approximate and missing are numbers of operations, counted {counted}.
Seconds are for capture, propagation, and propagation with positions apart.
"""


NORMALIZED = """## Normalized, folded and trained
{count} of these models, and {drawn} drawn at random, go through `vp.normalize`, after parameters that are all 0 or 1
and the statistics of batch norms have been given random values. A model is right if `init="preserve"` keeps its
function, `vp.fold` gives the function of the normalized model before and after a step of training, the loss is finite,
and every parameter that had a gradient still has one. Differences are the largest of any output, relative to its
standard deviation, in double precision (in single precision for models above 150 million parameters, and where the
model's code requires it). *Refused*: with one sentence, below. *Too slow here*: not finished within the seconds of CPU
time listed below, on a machine with two cores; nothing is known about these. *drawn*: published timm models that no
other table names, each of another family and of at most 40 million parameters, drawn before any of them was tried. Two
of them led to changes: one was slow and ran out of memory, and a refusal took too long.{torch}
"""


def golden(records: Iterable[Record]) -> list[Record]:
    """What has to be the same each time, a short record a model."""
    return [_kept(record) for record in records]


def _kept(record: Record) -> Record:
    kept = {key: record[key] for key in ("model", "status", "parameters", "input", "torch") if key in record}
    kept |= {key: record[key] for key in ("exact", "approximate", "missing", "error", "layers") if record.get(key)}
    apart = record.get("apart", {})
    if record.get("median_error") is not None:
        kept |= {"median_error": round(record["median_error"], 3), "good_layers": record["good_layers"]}
    if apart.get("median_error") is not None:
        kept |= {"apart_error": round(apart["median_error"], 3), "apart_good_layers": apart["good_layers"]}
    if _error(kept) > GOOD:
        kept["why"] = said((apart if "apart_error" in kept else record)["cause"])
        kept["why"] += f"; positions apart: {apart['error']}" if "error" in apart else ""
    return kept


def _recounted(kept: Record, record: Record) -> Record:
    """A golden record with the counts of another."""
    rest = {key: value for key, value in kept.items() if key not in ("exact", "approximate", "torch")}
    return rest | {key: record[key] for key in ("exact", "approximate", "torch") if key in record}


def _error(record: Record) -> float:
    """With positions apart if that was measured; 0 if nothing was."""
    found: float = record.get("apart_error", record.get("median_error", 0.0))
    return found


def write(names: list[str], measured: dict[str, Record], normalized: list[Record], samples: int) -> None:
    """The golden file, the times, and the page; models that were not measured keep what the files say of them.

    `normalized` are the records of the normalization, as `normalized.write` returns them.
    """
    known = {record["model"]: record for record in json.loads(GOLDEN.read_text())}
    for record in golden(measured.values()):  # of those that were only counted the rest stays
        counted = record["status"] == "counted"
        known[record["model"]] = _recounted(known[record["model"]], record) if counted else record
    short = [known.get(name, {"model": name, "status": "not measured"}) for name in names]
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(record) for record in short) + "\n]\n")
    taken = {name: _times(record) for name, record in measured.items() if "propagate_s" in record}
    times = json.loads(TIMES.read_text()) | taken
    TIMES.write_text(
        "{\n" + ",\n".join(f'"{name}": {json.dumps(times[name])}' for name in names if name in times) + "\n}\n"
    )
    PAGE.write_text(page(short, times, normalized, samples))


def _times(record: Record) -> list[float]:
    found = [record[key] for key in ("capture_s", "propagate_s") if key in record]
    return [
        round(seconds, 1) for seconds in [*found, record.get("apart", {}).get("propagate_s")] if seconds is not None
    ]


def page(records: list[Record], times: dict[str, list[float]], normalized: list[Record], samples: int) -> str:
    """The page in markdown."""
    head = INTRODUCTION.format(
        total=len(records), machine=_machine(), versions=_versions(), samples=samples, counted=_by_torch(records)
    )
    sections = [
        head,
        _groups(records, times),
        NORMALIZED.format(
            count=sum(kind(record) != DRAWN for record in normalized),
            drawn=sum(kind(record) == DRAWN for record in normalized),
            torch=_with_torch([record["model"] for record in records], normalized),
        ),
        _normalized(normalized),
        _not_normalized(normalized),
    ]
    sections += ["## Not end to end", _failures(records), "## Error above 10 %", _large(records)]
    sections += ["## What keeping positions apart brings", _apart(records), "## All models", _models(records, times)]
    return "\n".join(sections)


def _by_torch(records: list[Record]) -> str:
    """How many models were counted with which torch, and what the counts of the others do not know."""
    versions = Counter(record["torch"].partition("+")[0] for record in records if "torch" in record)
    counts = [f"for {count} models with torch {version}" for version, count in sorted(versions.items())]
    before = len(records) - versions.total()
    old = [f"for {before} before rectifiers of skips and averages over windows that overlap were marked approximate"]
    return " and ".join(counts + old * bool(before))


def _with_torch(names: list[str], normalized: list[Record]) -> str:
    """How many were normalized with which torch (2.13.0 before it was recorded), and which never."""
    versions = Counter(record.get("torch", "2.13.0").partition("+")[0] for record in normalized)
    named = ", ".join(f"{count} with torch {version}" for version, count in versions.most_common())
    tried = {record["model"] for record in normalized}
    untried = [name for name in names if name not in tried]
    return f" {named}." * bool(named) + f" Not tried: {', '.join(untried)}." * bool(untried)


def _machine() -> str:
    return f"{platform.machine()}, one CPU thread, Python {platform.python_version()}"


def _versions() -> str:
    packages = dict.fromkeys(["torch", *(package for package, _ in GROUPS.values())])
    names = [package.replace("_", "-") for package in packages if importlib.util.find_spec(package)]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def kind(record: Record) -> str:
    """The group a model is counted in."""
    group, _, name = record["model"].partition("/")
    if group != "torchvision":
        return group
    return REST if name.startswith(OTHER) else CLASSIFICATION


def _groups(records: list[Record], times: dict[str, list[float]]) -> str:
    groups = dict.fromkeys(map(kind, records))
    rows = [_group(name, [record for record in records if kind(record) == name], times) for name in groups]
    head = ["group", "models", "end to end", "error <= 10 %, positions alike", "or apart", "median error"]
    head += ["propagation, median s"]
    return _table(head, [*rows, _group("all", records, times)])


def _group(name: str, records: list[Record], times: dict[str, list[float]]) -> list[str]:
    done = [record for record in records if record["status"] == "done"]
    measured = [record for record in done if "median_error" in record]
    good = [sum(error <= GOOD for error in map(of, measured)) for of in (lambda r: r["median_error"], _error)]
    seconds = [times[record["model"]][1] for record in measured if record["model"] in times]
    middle = [f"{statistics.median(map(_error, measured)):.1%}", f"{statistics.median(seconds):.1f}"]
    counts = [_share(count, len(records)) for count in (len(done), *good)]
    return [name, str(len(records)), *counts, *(middle if measured else ["", ""])]


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})"


def _normalized(records: list[Record]) -> str:
    head = ["group", "models", "right", "refused", "wrong or crashed", "too slow here"]
    head += ["preserve, largest difference", "fold", "dtype"]
    rows = []
    for dtype in ("float64", "float32", ""):
        of_dtype = [record for record in records if record.get("dtype", "") == dtype]
        for group in dict.fromkeys(map(kind, of_dtype)):
            members = [record for record in of_dtype if kind(record) == group]
            done = [record for record in members if record["status"] == "done"]
            wrong = [record for record in members if record["status"] in ("differs", "crash")]
            slow = [record for record in members if record["status"] == "too long"]
            largest = [f"{max(record[key] for record in done):.0e}" if done else "" for key in ("preserve", "fold")]
            refused = len(members) - len(done) - len(wrong) - len(slow)
            counts = [len(members), len(done), refused, len(wrong), len(slow)]
            rows.append([group, *map(str, counts), *largest, dtype])
    totals = [str(sum(int(row[column]) for row in rows)) for column in range(1, 6)]
    return _table(head, [*rows, ["all", *totals, "", "", ""]])


def _not_normalized(records: list[Record]) -> str:
    failed = [record for record in records if record["status"] != "done"]
    rows = [[r["model"], r["status"], r.get("error") or r.get("step") or _distances(r)] for r in failed]
    return _table(["model", "what", "why"], rows) if rows else "All of them are.\n"


def _distances(record: Record) -> str:
    return ", ".join(f"{key} {record[key]:.0e}" for key in beyond(record))


def _failures(records: list[Record]) -> str:
    failed = [record for record in records if record["status"] != "done"]
    rows = [[record["model"], record["status"], record.get("error") or _missing(record)] for record in failed]
    return _table(["model", "what", "why"], rows) if rows else "None.\n"


def _missing(record: Record) -> str:
    return ", ".join(f"{op} x{count}" for op, count in record.get("missing", {}).items())


def _large(records: list[Record]) -> str:
    far = [record for record in records if "why" in record]
    return _table(["model", "error", "why"], [[r["model"], f"{_error(r):.0%}", r["why"]] for r in far])


def _apart(records: list[Record]) -> str:
    both = [record for record in records if "apart_error" in record]
    rows = [[r["model"], f"{r['median_error']:.1%}", f"{r['apart_error']:.1%}"] for r in both]
    return _table(["model", "error, positions alike", "positions apart"], rows) if rows else "Nothing.\n"


def _models(records: list[Record], times: dict[str, list[float]]) -> str:
    head = [
        "model",
        "input",
        "parameters, M",
        "exact",
        "approximate",
        "missing",
        "capture, propagate, apart s",
        "layers",
        "error",
    ]
    rows = []
    for record in records:
        cells = [record["model"], record.get("input", ""), f"{record.get('parameters', 0) / 1e6:.1f}"]
        cells += [str(record.get(key, "")) for key in ("exact", "approximate")] + [_missing(record)]
        cells += [", ".join(map(str, times.get(record["model"], []))), str(record.get("layers", ""))]
        rows.append([*cells, f"{_error(record):.1%}" if "median_error" in record else record["status"]])
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"
