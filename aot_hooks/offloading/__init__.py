"""Saved tensors in host memory: the hook, its four operators and streams, pinned memory, and when copies start."""
