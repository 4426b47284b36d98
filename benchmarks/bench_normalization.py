"""Training steps with each normalization side by side: time, memory, kernels.

python benchmarks/bench_normalization.py [--device cpu] [--cases cifar mlp] [--out DIR] (--help for all options)
"""

from varprop.lab.bench.__main__ import main

if __name__ == "__main__":
    main()
