"""torch's caches of compiled graphs, for graphs with hooks: when they may be used, what came of it, and why.

lookup.py compiles through them, by a key that key.py makes. entry.py has the data that an entry stores for hooks,
notes.py what `explain-miss` prints of a miss.
"""

from .lookup import bypassed, cache_stats, forget, through_cache

__all__ = ["bypassed", "cache_stats", "forget", "through_cache"]
