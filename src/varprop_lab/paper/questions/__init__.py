"""What the paper leaves open, answered by short trainings of its MNIST network: a file for every question.

- `arms`: one way of training, and what is kept of a run of it.
- `records`: the runs of a question, by arm, at the rate that suits each.
- `truth`, `averaging`, `dropout`, `norm`, `correlations`: what is compared, the claims with their rules, the figure.
- `study`: makes what is missing, writes the records, draws and judges.
"""
