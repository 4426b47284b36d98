"""What the paper leaves open, answered by short trainings of its MNIST network on a CPU.

    python -m benchmarks.questions [--only truth,averaging,...] [--jobs 6] [--root DIR] --out docs/results

- `runs`: one way of training, and what is kept of a run of it; the runs of a question, at the rate that suits each.
- `of_statistics`, `of_training`: what is compared, the claims with their rules, the figures.
- `study`: makes what is missing, writes the records, draws and judges.
"""
