"""Saved tensors in host memory: the hook, its operators and streams, pinned memory, and when copies start."""
