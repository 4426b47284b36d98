"""Sweep over public models with random weights.

python -m benchmarks.zoo sweep [MODEL ...] [--samples 24] [--limit 300] [--again]   (all models if none is named)
python -m benchmarks.zoo normalize [MODEL ...]   vp.normalize, vp.fold and a step of training against the original
                                                 (also of the models of drawn.txt, by name)
python -m benchmarks.zoo table                   docs/zoo.md, docs/results/zoo.json, zoo_normalize.json
python -m benchmarks.zoo alarms [MODEL ...]      what vp.inspect says of each as it is
python -m benchmarks.zoo damage [MODEL ...]      and of some of them damaged in ways it has to notice
python -m benchmarks.zoo findings                the tables of both for docs/inspector.md, docs/results/findings.json

Models are judged again if the sources of the judge have changed since; what was not keeps its record in the table,
which says when each was judged, and by which judge.

A model is named group/name: torchvision/resnet18, timm/vit_tiny_patch16_224, hf/bert, smp/Unet, monai/UNet; those whose
package is not installed are left out. Each is captured, its operations are counted (exact, approximate, missing), and
moments are propagated from a standard normal input on uniform axes. Then standard normal inputs (tokens of equal
probability) go through it one by one: for every module called once, the analytic and the measured standard deviation
are compared, each as the root mean square over the module's units. Where more than 10 % are missed, the same is done
with the positions of images apart. Results are appended to runs/zoo/zoo.jsonl, or to the journals in another folder by
--runs; a sweep that was interrupted goes on where it was. Journals are merged by joining the files: of several lines of
one model the last counts.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch

from . import alarms, damage, measure, normalized, table
from .models import all_names, drawn_names
from .sweep import Settings, journal, sweep

RUNS = Path("runs/zoo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["sweep", "normalize", "table", "alarms", "damage", "findings"])
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of CPU time a model")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB a model")
    parser.add_argument("--workers", type=int, default=1, help="models at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each model; all of them count as CPU time")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="after which it ends, however far it is")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the folder of the journals")
    parser.add_argument("--again", action="store_true", help="also models that have a result")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)  # more of them in a process that forks would hang the forks
    studies = {
        "sweep": (options.runs / "zoo.jsonl", partial(measure.study, samples=options.samples), measure.said),
        "normalize": (options.runs / "normalize.jsonl", normalized.study, normalized.said),
        "alarms": (options.runs / "alarms.jsonl", alarms.study, alarms.said),
        "damage": (options.runs / "damage.jsonl", damage.study, damage.said),
    }
    if options.command == "table":
        checked = normalized.write([*all_names(), *drawn_names()], journal(options.runs / "normalize.jsonl"))
        table.write(all_names(), journal(options.runs / "zoo.jsonl"), checked, options.samples)
    elif options.command == "findings":
        sound, damaged = alarms.committed()
        sound = alarms.newest(sound, journal(options.runs / "alarms.jsonl"))
        damaged = alarms.newest(damaged, journal(options.runs / "damage.jsonl"))
        alarms.write([sound[name] for name in all_names() if name in sound], list(damaged.values()))
    else:
        names = damage.models() if options.command == "damage" else _smallest_first()
        names += drawn_names() if options.command == "normalize" else []
        stamp = alarms.stamp() if options.command in ("alarms", "damage") else {}
        more = (options.again, stamp, options.workers, options.threads, options.max_seconds)
        settings = Settings(*studies[options.command], options.limit, options.memory, *more)
        sweep(options.models or names, settings)


def _smallest_first() -> list[str]:
    """All models by the seconds that their measurement took; those without one last."""
    times = json.loads(table.TIMES.read_text())
    return sorted(all_names(), key=lambda name: sum(times[name]) if name in times else math.inf)


if __name__ == "__main__":
    main()
