"""Everything of this package that touches `torch._*`, with tables of it: see `symbols`.

`cuda` has operators, storages, the allocator and CUDA graphs; `compilers` AOTAutograd and Inductor; `autograd_cache`
the extensions of torch's cache of AOTAutograd's results. `aot_hooks` calls some of these functions, too.
"""
