"""Checkpoints and data sets by name."""
