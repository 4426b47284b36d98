"""The paper's comparison of normalizations, as a tool: equal starts, learning rates found by Brent, running losses.

- `data`: data sets, their download, augmentation and batches.
- `protocol`: the experiments as plain values, their results, networks and starting points.
- `training`: one network, or many as a stacked ensemble, traced, and captured as CUDA graphs.
- `execution`: runs an experiment: search, training, checkpoints, processes.
- `store`: the folder of results.
- `verdicts`: the paper's claims, judged on results.
- `report`: tables, figures, HTML and Markdown from results.
- `bench`: what a training step costs with each normalization.
- `compare`: the same comparison for a model of one's own.
"""
