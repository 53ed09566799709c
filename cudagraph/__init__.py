"""CUDA graph trees for compiled functions, with a host cost a call that stays small.

The package is a place and a name so far: what it will hold takes a compiled forward and backward, records each as a
CUDA graph and replays it.
"""

__all__: tuple[str, ...] = ()
