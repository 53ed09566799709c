"""From two graphs and a setting to two graphs with hooks in them. `rewrite.rewrite` runs the passes in order.

plan          which hook for which saved value, and why not: data, no graph is touched
answers       decisions of the backward move to the forward, as bits
dedup_copies  values that are copies of others share the packed data
units         the hooks of each value traced, by trace, and positioned
inline        pack to the end of the forward, unpack to the start of the backward
snapshots     before all that: a saved buffer that is written before the backward is copied first
live_bytes    the bytes alive at each node, before and after

edits, strides and logs help them.
"""
