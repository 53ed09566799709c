"""Everything of this package that touches `torch._*`, one file for each subsystem of torch.

A missing symbol raises `UnsupportedTorchError` where it is needed. `python -m aot_hooks env --symbols` prints them all,
read off the sources. Attributes of torch's objects that these files use are in `tests/support/private_attributes.py`.
Functions that both packages need are in `cudagraph/torch_private/`. Nothing here knows hooks, policies or plans.
"""
