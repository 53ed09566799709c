"""The same hooks on what eager parts save: the code around compiled graphs, and functions that are not compiled."""
