"""float8, int8 and int4 as operators that Inductor compiles as one loop, with inline PTX on NVIDIA GPUs."""
