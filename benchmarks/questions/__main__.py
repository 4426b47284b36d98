"""Answers the questions, with the runs that the folder of the results has and those that are missing."""

import argparse
import math
from pathlib import Path

from .study import QUESTIONS, study

parser = argparse.ArgumentParser(prog="python -m benchmarks.questions", description=__doc__)
parser.add_argument("--out", type=Path, required=True, help="Folder of the records and figures.")
parser.add_argument("--root", type=Path, help="Folder of MNIST, if it is not where varprop looks for data.")
parser.add_argument("--only", type=lambda names: names.split(","), default=list(QUESTIONS), metavar="NAMES")
parser.add_argument("--seeds", type=int, help="Of every arm; as many as the question asks for by default.")
parser.add_argument("--jobs", type=int, default=1, help="So many runs at once, each in a process of its own.")
parser.add_argument("--max-seconds", type=float, default=math.inf, help="After this time no run is begun.")

if __name__ == "__main__":
    options = parser.parse_args()
    if unknown := set(options.only) - QUESTIONS.keys():
        parser.error(f"there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    study(options.out, options.root, options.only, options.seeds, jobs=options.jobs, max_seconds=options.max_seconds)
