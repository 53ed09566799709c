"""float8 and int8 as operators that Inductor compiles as one loop each, in inline PTX.

The library's arithmetic is written three times, because none of the languages runs everywhere:

    tensor code   any device, in eager mode and under Inductor; the reference that the other two are tested with
    PTX           NVIDIA GPUs under Inductor: one node and few instructions for each step
    Triton        NVIDIA GPUs where nothing fuses the tensor code: in eager mode and with inner="aten"; for int4 and
                  stochastic rounding also under Inductor

    step                        tensor code                       PTX (ptx.py)               Triton (triton/)

    largest finite |x|          scales.finite_magnitudes, amax    amax_bits                  kernels8.finite_magnitudes
      its upper 16 bits         operators.amax_word               amax_word                  -
      its biased exponent       operators.amax_exponent           amax_exponent              -
    scale: power of two         scales.power_of_two               _scale_of_bits             kernels8._scale(POWER)
      of a stored exponent      operators._scale_of_exponent      _scale_of_exponent         kernels8._unpack8
    scale: bfloat16, up         scales.round_up_to_bfloat16       -                          kernels8._scale
    amax of 16 stored bits      operators._amax_of_word           _amax_of_word              -
    float8 codes                scales.float8_codes               to_float8                  kernels8._encode
      and back                  scales.float8_values              from_float8                kernels8._unpack8
    int8 codes, -128 to 127     integer.pack_int8                 -                          kernels8._encode
      and back                  integer.unpack_int8               -                          kernels8._unpack8
    int8 codes + 127, 0 to 255  operators.to_int8                 to_int8                    -
      and back                  operators.from_int8               from_int8                  -
    int4 codes and zeros        integer.pack_int4, unpack_int4    -                          kernels4._pack4, _unpack4
    bits                        bitmask.pack_bits, unpack_bits    -                          kernels8._pack1, _unpack1

`scales.py` has the constants of all. Tests hold each row together: test_ptx.py runs the PTX on an emulator,
test_kernels.py runs the kernels in Triton's interpreter, and both compare bit for bit with the tensor code.
"""
