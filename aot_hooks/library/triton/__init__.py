"""float8, int8, int4 and bit masks as Triton kernels of our own, for graphs that no compiler fuses (`inner="aten"`)."""
