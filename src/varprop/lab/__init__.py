"""The paper's comparison of normalizations, as a tool: equal starts, learning rates found by Brent, running losses."""
