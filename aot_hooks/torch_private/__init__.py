"""Everything of this package that touches `torch._*`, one file for each subsystem of torch.

Each file lists its private symbols in `SYMBOLS`, with what needs them. A missing symbol raises `UnsupportedTorchError`
where it is needed; `python -m aot_hooks env` prints them all. Nothing here knows hooks, policies or plans.
"""
