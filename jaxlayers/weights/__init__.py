"""Checkpoints to and from the stacked tree."""
