"""A whole training step as one CUDA graph: `whole_step`, what it notices between calls, and its recordings."""
