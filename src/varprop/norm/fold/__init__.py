"""The fold: the definition of the folded weights, and who computes them and their derivatives."""
