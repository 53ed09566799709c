"""float8, int8, int4 and bit masks as Triton kernels where no compiler fuses: in eager mode and with `inner="aten"`."""
