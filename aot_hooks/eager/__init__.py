"""Hooks on tensors that eager code saves: the code around compiled graphs, and functions that are not compiled."""
