"""Run time: which recording replays next, what it needs, and the memory pool that all recordings share."""
