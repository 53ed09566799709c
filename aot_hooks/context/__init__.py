"""The two contexts of the public interface, around compiled calls and inside compiled functions.

      with saved_tensors_hooks(pack, unpack):     around a compiled call: a pair of GraphModules on torch's own stack,
          loss = compiled(x)                      one pair for one value (pairs.py). Dynamo guards the pair by identity,
                                                  and so the value. Eager parts call the pair (eager/).
      def f(x):                                   inside a compiled function: the setting's key is annotated on the
          with saved_tensors_hooks(pack, unpack): nodes of the region (region.py), and guarded by value
              ...

identity/ tells which value a hook or policy is. A pair records what graphs depend on, and is found again on entry if
that is unchanged. Contexts nest, the innermost wins; they are thread-local because torch's stack is. A compiled call
raises if its hook has changed since the context was entered. Eager parts call the hook as it is.
"""
