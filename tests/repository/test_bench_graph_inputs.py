"""What bench_graph_inputs.py reads from a graph, decides and writes, on a driver made of Python functions."""

from __future__ import annotations

import ctypes
import pathlib
import struct
import sys
from typing import Any

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
from bench_graph_inputs import Driver, KernelParams, Place, Updates, against, find

A, B = 0x7F0000000000, 0x7F0000100000


class Kernel:
    def __init__(self, *values: bytes, name: str = "add", layout: bool = True, packed: bool = False) -> None:
        self.values, self.name, self.layout, self.packed = values, name, layout, packed
        self.buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self.buffers))
        self.packet = ctypes.create_string_buffer(b"".join(values))
        self.extra = (ctypes.c_void_p * 3)(1, ctypes.addressof(self.packet), 0)
        self.given: list[bytes] | None = None

    def params(self, number: int) -> KernelParams:
        pointers = ctypes.POINTER(ctypes.c_void_p)
        params = KernelParams(func=number, grid=(1, 1, 1), block=(32, 1, 1))
        if self.packed:
            params.extra = ctypes.cast(self.extra, pointers)
        else:
            params.values = ctypes.cast(self.pointers, pointers)
        return params


class Library:
    """libcuda with one graph, whose nodes are kernels, or other nodes by their types. Handles count from 1."""

    def __init__(self, *nodes: Kernel | int) -> None:
        self.all = nodes

    def cuGraphGetNodes(self, graph: Any, found: Any, count: Any) -> int:
        count._obj.value = len(self.all)
        for i in range(len(self.all) if found is not None else 0):
            found[i] = i + 1
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        each = self.all[node.value - 1]
        kind._obj.value = 0 if isinstance(each, Kernel) else each
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        made = self.all[node.value - 1].params(node.value)
        ctypes.memmove(params, ctypes.byref(made), ctypes.sizeof(made))
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        name._obj.value = self.all[function.value - 1].name.encode()
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        kernel = self.all[function.value - 1]
        if not kernel.layout:
            return 999
        if index.value >= len(kernel.values):
            return 1
        offset._obj.value = sum(map(len, kernel.values[: index.value]))
        size._obj.value = len(kernel.values[index.value])
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, graph: Any, node: Any, params: Any) -> int:
        kernel = self.all[node.value - 1]
        kernel.given = [ctypes.string_at(params._obj.values[i], len(v)) for i, v in enumerate(kernel.values)]
        return 0


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def step(a: int, b: int, *more: Any) -> Driver:
    """A kernel with an address of its own and a struct with an address in it, and one whose parameters are packed."""
    return Driver(
        Library(Kernel(words(a), words(7, b + 16), b"\1\2\3\4"), Kernel(words(3), words(a), packed=True), *more)
    )


RANGES = [(A, 256), (B, 256)]
MOVED = [(A + 4096, 256), (B + 8192, 256)]


def reasons(first: Driver, second: Driver, inputs: int = 2) -> list[str]:
    read, read_2 = first.read(1), second.read(1)
    return against(read, read_2, find(read[0], RANGES), find(read_2[0], MOVED), inputs)


def test_addresses_are_found_in_parameters_and_in_structs():
    kernels, others = step(A, B, 1).read(1)
    assert others == {"memcpy": 1} and kernels[1].values == [words(3), words(A)]
    assert find(kernels, RANGES) == [Place(0, 0, 0, 0, 0), Place(0, 1, 8, 1, 16), Place(1, 1, 0, 0, 0)]
    assert find(kernels, [(B, 16)]) == []


def test_two_captures_that_differ_in_addresses_of_inputs_alone():
    assert reasons(step(A, B), step(A + 4096, B + 8192)) == []


@pytest.mark.parametrize(
    "first, second, message",
    [
        ((Kernel(words(5)),), (Kernel(words(6)),), "byte 0 of parameter 0 differs"),
        ((Kernel(words(A), name="x"),), (Kernel(words(A), name="x"),), "1 words are addresses of inputs in one"),
        ((Kernel(words(5), layout=False),), (Kernel(words(5), layout=False),), "parameters of add can't be read"),
        ((1,), (1,), "1 nodes of type memcpy"),
        ((Kernel(words(5), name="x"),), (Kernel(words(5), name="y"),), "have other nodes"),
    ],
)
def test_what_speaks_against_updates(first, second, message):
    (reason,) = reasons(step(A, B, *first), step(A + 4096, B + 8192, *second))
    assert message in reason


def test_an_input_that_no_kernel_has():
    assert reasons(step(A, B), step(A + 4096, B + 8192), inputs=3) == ["1 inputs are in no kernel's parameters"]


@pytest.mark.parametrize("way", ["by_ctypes", "by_c"])
def test_updates_give_kernels_new_addresses_and_all_else_as_it_was(way):
    driver = step(A, B, Kernel(words(1)))
    kernels, _ = driver.read(1)
    updates = Updates(driver, 1, kernels, find(kernels, RANGES))
    given = []
    if way == "by_c":

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        def take(graph, node, params):
            kernel = driver.lib.all[node - 1]
            found = KernelParams.from_address(params)
            given.append([ctypes.string_at(found.values[i], len(v)) for i, v in enumerate(kernel.values)])
            return 0

        driver.lib.cuGraphExecKernelNodeSetParams_v2 = take
    update = getattr(updates, way)()
    if update is None:
        pytest.skip("there is no C compiler")
    update([A + 4096, B + 8192])
    if way == "by_ctypes":
        given = [kernel.given for kernel in driver.lib.all if kernel.given is not None]
    assert given == [[words(A + 4096), words(7, B + 8192 + 16), b"\1\2\3\4"], [words(3), words(A + 4096)]]


def test_an_error_of_the_driver_is_raised():
    driver = step(A, B)
    driver.lib.cuGraphNodeGetType = lambda *_: 400
    with pytest.raises(RuntimeError, match="cuGraphNodeGetType returned error 400"):
        driver.read(1)
