"""The experiments of the paper: what is trained, its claims with verdicts, and the questions it leaves open."""
