"""torch's caches of compiled graphs, for graphs with hooks: when they may be used, what came of it, and why.

lookup.py compiles through them, by a key that key.py makes. entry.py has the data that an entry stores for hooks,
notes.py what `explain-miss` prints of a miss.
"""
