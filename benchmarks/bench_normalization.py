"""Training steps with each normalization side by side: time, memory, kernels.

python -m benchmarks.bench_normalization [--device cpu] [--cases cifar,mlp] [--out DIR] (--help for all options)
"""

import sys

from varprop.cli.main import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
