"""Equality of hooks and policies: a hook made anew costs nothing, a changed one exactly one compilation.

      rule --described--> text of its frozen parts (arguments of the library, graphs), and its functions, if any
      functions           `Probe`: Dynamo traces `unpack(pack(example))`; its guards tell at a call if they changed
      policies            called again for the same saved tensors
      Record              everything that a graph depends on: `record.matches(rule)` tells whether it is unchanged

No user code is imported, walked or run to guess its meaning: Dynamo traces it, on fake tensors.
"""
