"""From two graphs and a setting to two graphs with hooks in them: `rewrite.rewrite` runs the passes in order.

`cudagraph.graph.snapshots` runs before them. `live_bytes` counts the bytes alive before and after, `edits` helps them
all.
"""
