"""Everything of this package that touches `torch._*`: `cuda` the allocator and CUDA graphs, `compilers` AOTAutograd,
Inductor and their caches."""
