"""Everything of this package that touches `torch._*`. `symbols` looks private symbols up, and lists them.

`cuda` has operators, storages, the allocator and CUDA graphs; `compilers` AOTAutograd and Inductor; `autograd_cache`
the extensions of torch's cache of AOTAutograd's results. `aot_hooks` calls some of these functions, too.
"""
