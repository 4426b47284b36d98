"""Collecting the numbers: one row a module call or operation, propagated and measured."""
