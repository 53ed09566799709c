"""Everything of this package that touches `torch._*`, one file for each subsystem of torch.

Each file lists its private symbols in `SYMBOLS`, and the attributes of torch's objects in `PROTOCOLS`, with what needs
them. A missing symbol raises `UnsupportedTorchError` where it is needed. `python -m aot_hooks env --symbols` prints
them all.
Functions that both packages need are in `cudagraph/torch_private/`. Nothing here knows hooks, policies or plans.
"""
