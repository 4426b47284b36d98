"""The claims of the paper, judged on results."""
