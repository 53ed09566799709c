"""Captures what AOTAutograd and Inductor compile, also when torch's caches loaded it."""
