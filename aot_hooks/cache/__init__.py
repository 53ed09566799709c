"""torch's caches of compiled graphs, for graphs with hooks: when they may be used, what came of it, and why.

lookup.py compiles through them; stored.py is what is kept beside an entry, notes.py what is said of a miss. The key is
made in `aot_hooks.cache_key`.
"""

from .lookup import bypassed, cache_stats, forget, through_cache

__all__ = ["bypassed", "cache_stats", "forget", "through_cache"]
