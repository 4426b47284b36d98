"""Judging the numbers: findings, their thresholds, and how those of two states differ."""
