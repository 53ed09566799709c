"""Inductor: what graphs with hooks need of it. marks.py is what the rewrite tells it."""
