"""Inputs of a CUDA graph: copies into the graph's memory, beside updates of the kernels' parameters in the graph.

    python benchmarks/bench_graph_inputs.py --json out.json           needs CUDA; about a minute

A graph reads its inputs at fixed addresses. Two ways to give it other tensors:

    copy     one fused copy (`torch._foreach_copy_`), then the launch
    update   each kernel that was launched with an input's address gets parameters with the new one
             (cuGraphExecKernelNodeSetParams), then the launch. See pytorch#182691.

An address is found by looking at the bytes of all parameters, in words of 8 bytes, also inside of structs that are
passed by value. That finds too much where a number looks like an address, and too little where an address is hidden:
in a tensor map, in memory that a kernel reads, in a copy node. So each step is captured twice with its inputs at other
addresses and all else equal. What differs between the two graphs must be addresses of inputs that were found:

    provable   yes if: all nodes are kernels with known parameters, every input was found in one, and every word that
               differs between the two graphs was found. Otherwise the inputs have to be copied.
    equal      results after an update, with NaN at the old addresses, are those of eager mode

Host time is until the launch returns; `synchronized` until the device is done. `python`: calls by ctypes;
`bindings`: by cuda-bindings; `c`: one call of a C function for all kernels, if there is a C compiler.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import ctypes
import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import conditions

WORD = 8
KERNEL = 0
NODE_TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "child graph", 5: "empty", 10: "alloc", 11: "free"}
INVALID_VALUE = 1
PARAM_BUFFER_POINTER = 1  # CU_LAUNCH_PARAM_BUFFER_POINTER: all parameters in one buffer

C_SOURCE = """
#include <stdint.h>
#include <stddef.h>
typedef int (*set_params)(void *exec, void *node, const void *params);
int update(set_params set, void *exec, size_t words, uint64_t **where, const int64_t *input, const int64_t *offset,
           const uint64_t *addresses, size_t kernels, void **nodes, const void **params) {
    for (size_t i = 0; i < words; i++) *where[i] = addresses[input[i]] + offset[i];
    for (size_t i = 0; i < kernels; i++) {
        int error = set(exec, nodes[i], params[i]);
        if (error) return error;
    }
    return 0;
}
"""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class DriverError(RuntimeError):
    """A call of the driver failed."""


@dataclasses.dataclass
class Kernel:
    """A kernel of a graph. `values`: the bytes of its parameters; None if they can't be read."""

    node: int
    name: str
    params: KernelParams
    values: list[bytes] | None


@dataclasses.dataclass(frozen=True)
class Place:
    """A word in a kernel's parameters that is an input's address plus `shift`."""

    kernel: int
    parameter: int
    offset: int
    input: int
    shift: int


class Driver:
    """The calls of the driver API that this needs. `lib`: libcuda."""

    def __init__(self, lib: Any = None) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1") if lib is None else lib

    def call(self, name: str, *arguments: Any) -> None:
        error = getattr(self.lib, name)(*arguments)
        if error:
            raise DriverError(f"{name} returned error {error}")

    def nodes(self, graph: int) -> list[int]:
        count = ctypes.c_size_t()
        self.call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        self.call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
        return [each or 0 for each in found]

    def read(self, graph: int) -> tuple[list[Kernel], dict[str, int]]:
        """The kernels of a graph in the order of its nodes, and how many nodes of other types it has."""
        kernels, others = [], collections.Counter[str]()
        for node in self.nodes(graph):
            kind = ctypes.c_int()
            self.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            if kind.value == KERNEL:
                kernels.append(self.kernel(node))
            else:
                others[NODE_TYPES.get(kind.value, f"type {kind.value}")] += 1
        return kernels, dict(others)

    def kernel(self, node: int) -> Kernel:
        params = KernelParams()
        self.call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        name = ctypes.c_char_p()
        if params.func:
            self.call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
        else:
            self.call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        return Kernel(node, (name.value or b"").decode(), params, self.values(params))

    def values(self, params: KernelParams) -> list[bytes] | None:
        layout = self.layout(params)
        if layout is None:
            return None
        if params.values:
            return [ctypes.string_at(params.values[i] or 0, size) for i, (_, size) in enumerate(layout)]
        if params.extra and params.extra[0] == PARAM_BUFFER_POINTER:
            return [ctypes.string_at((params.extra[1] or 0) + offset, size) for offset, size in layout]
        return None if layout else []

    def layout(self, params: KernelParams) -> list[tuple[int, int]] | None:
        """Offset and size of each parameter; None if that is not known."""
        owner = params.func or params.kern
        name = "cuFuncGetParamInfo" if params.func else "cuKernelGetParamInfo"
        found: list[tuple[int, int]] = []
        while True:
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            error = getattr(self.lib, name)(
                ctypes.c_void_p(owner), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
            )
            if error == INVALID_VALUE:  # there is no such parameter
                return found if found or not (params.values or params.extra) else None
            if error:
                return None
            found.append((offset.value, size.value))


def find(kernels: Sequence[Kernel], ranges: Sequence[tuple[int, int]]) -> list[Place]:
    """The words in the kernels' parameters that lie in an input; `ranges` has the inputs' (address, bytes)."""
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    starts = [ranges[i][0] for i in order]
    found = []
    for k, kernel in enumerate(kernels):
        for p, value in enumerate(kernel.values or ()):
            for offset in range(0, len(value) - WORD + 1, WORD):
                word = int.from_bytes(value[offset : offset + WORD], "little")
                n = bisect.bisect_right(starts, word) - 1
                if n >= 0 and word < starts[n] + ranges[order[n]][1]:
                    found.append(Place(k, p, offset, order[n], word - starts[n]))
    return found


def against(
    first: tuple[list[Kernel], dict[str, int]],
    second: tuple[list[Kernel], dict[str, int]],
    found: Sequence[Place],
    found_2: Sequence[Place],
    inputs: int,
) -> list[str]:
    """What speaks against updates, by two captures of a step with its inputs at other addresses.

    `found` and `found_2` are what `find` found in them, for a step of so many `inputs`.

    An empty list means that the words which differ are the addresses of inputs that were found, and nothing else.
    """
    (kernels, others), (kernels_2, others_2) = first, second
    reasons = [f"{count} nodes of type {kind}" for kind, count in others.items() if kind != "empty"]
    opaque = [kernel.name for kernel in kernels if kernel.values is None]
    reasons += [f"the parameters of {name} can't be read" for name in dict.fromkeys(opaque)]
    missing = set(range(inputs)) - {place.input for place in found}
    if missing:
        reasons.append(f"{len(missing)} inputs are in no kernel's parameters")
    if others != others_2 or [(k.name, [*k.params.grid]) for k in kernels] != [
        (k.name, [*k.params.grid]) for k in kernels_2
    ]:
        return [*reasons, "the two captures have other nodes"]
    same = set(found) & set(found_2)
    if set(found) ^ set(found_2):
        reasons.append(f"{len(set(found) ^ set(found_2))} words are addresses of inputs in one capture only")
    known = {(place.kernel, place.parameter, place.offset) for place in same}
    for k, (a, b) in enumerate(zip(kernels, kernels_2, strict=True)):
        for p, (x, y) in enumerate(zip(a.values or (), b.values or (), strict=True)):
            for offset in range(0, len(x), WORD):
                if x[offset : offset + WORD] != y[offset : offset + WORD] and (k, p, offset) not in known:
                    reasons.append(f"{a.name}: byte {offset} of parameter {p} differs and is no input's address")
    return [*dict.fromkeys(reasons)]


class Updates:
    """New parameters for the kernels at `places`, written by `write`, and given to a graph by one of the others."""

    def __init__(self, driver: Driver, execution: int, kernels: Sequence[Kernel], places: Sequence[Place]) -> None:
        self.driver, self.execution, self.places = driver, execution, places
        used = sorted({place.kernel for place in places})
        self.buffers: list[Any] = []
        self.nodes, self.params = [], []
        words: dict[tuple[int, int], Any] = {}
        for k in used:
            values = kernels[k].values
            assert values is not None
            pointers = (ctypes.c_void_p * max(len(values), 1))()
            for p, value in enumerate(values):
                buffer = (ctypes.c_char * max(len(value), 1)).from_buffer_copy(value or b"\0")
                words[k, p] = buffer
                pointers[p] = ctypes.addressof(buffer)
            params = KernelParams.from_buffer_copy(kernels[k].params)
            params.values, params.extra = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)), None
            self.buffers.append(pointers)
            self.nodes.append(ctypes.c_void_p(kernels[k].node))
            self.params.append(params)
        self.buffers.append(words)
        self.words = [ctypes.c_uint64.from_buffer(words[x.kernel, x.parameter], x.offset) for x in places]
        self.inputs, self.shifts = [place.input for place in places], [place.shift for place in places]

    def write(self, addresses: Sequence[int]) -> None:
        for word, i, shift in zip(self.words, self.inputs, self.shifts, strict=True):
            word.value = addresses[i] + shift

    def by_ctypes(self) -> Callable[[Sequence[int]], None]:
        execution, call = ctypes.c_void_p(self.execution), self.driver.call
        pairs = [(node, ctypes.byref(params)) for node, params in zip(self.nodes, self.params, strict=True)]

        def update(addresses: Sequence[int]) -> None:
            self.write(addresses)
            for node, params in pairs:
                call("cuGraphExecKernelNodeSetParams_v2", execution, node, params)

        return update

    def by_bindings(self) -> Callable[[Sequence[int]], None] | None:
        try:
            from cuda.bindings import driver
        except ImportError:
            return None
        execution = driver.CUgraphExec(init_value=self.execution)
        pairs = []
        for node, ours in zip(self.nodes, self.params, strict=True):
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            ctypes.memmove(params.getPtr(), ctypes.byref(ours), ctypes.sizeof(ours))
            pairs.append((driver.CUgraphNode(init_value=node.value), params))

        def update(addresses: Sequence[int]) -> None:
            self.write(addresses)
            for node, params in pairs:
                (error,) = driver.cuGraphExecKernelNodeSetParams(execution, node, params)
                if error.value:
                    raise DriverError(f"cuGraphExecKernelNodeSetParams returned error {error}")

        return update

    def by_c(self) -> Callable[[Sequence[int]], None] | None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return None
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "update.c").write_text(C_SOURCE)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(folder / "update.so"), str(folder / "update.c")]
        subprocess.run(command, check=True)
        run = ctypes.CDLL(str(folder / "update.so")).update
        shutil.rmtree(folder)
        count, kernels = len(self.words), len(self.nodes)
        where = (ctypes.c_void_p * count)(*map(ctypes.addressof, self.words))
        inputs, shifts = (ctypes.c_int64 * count)(*self.inputs), (ctypes.c_int64 * count)(*self.shifts)
        nodes = (ctypes.c_void_p * kernels)(*(node.value for node in self.nodes))
        params = (ctypes.c_void_p * kernels)(*map(ctypes.addressof, self.params))
        fixed = (
            ctypes.cast(self.driver.lib.cuGraphExecKernelNodeSetParams_v2, ctypes.c_void_p),
            ctypes.c_void_p(self.execution), ctypes.c_size_t(count), where, inputs, shifts,
        )  # fmt: skip

        def update(addresses: Sequence[int]) -> None:
            given = (ctypes.c_uint64 * len(addresses))(*addresses)
            error = run(*fixed, given, ctypes.c_size_t(kernels), nodes, params)
            if error:
                raise DriverError(f"cuGraphExecKernelNodeSetParams returned error {error}")

        return update


# --- programs: functions of a list of inputs that return a list of results


def pointwise(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each input is read by two kernels."""
    return [x.sin().add_(x) for x in inputs]


def in_structs(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Addresses are in tables that are passed by value."""
    return list(torch._foreach_mul(inputs, 2.0))


def products(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Kernels of cuBLAS."""
    return [x @ x for x in inputs]


def step_of_moving_parameters(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A step of training writes to its parameters: forward, backward, update."""
    weights = [x.detach().requires_grad_() for x in inputs]
    y = torch.ones_like(inputs[0])
    for weight in weights:
        y = torch.tanh(y @ weight)
    gradients = torch.autograd.grad(y.square().mean(), weights)
    torch._foreach_add_(inputs, list(gradients), alpha=-0.01)
    torch._foreach_mul_(inputs, -1.0)  # a write that is missing shows
    return []


PROGRAMS = (
    *((pointwise, count, (32, 128)) for count in (1, 16, 200)),
    *((in_structs, count, (32, 128)) for count in (16, 200)),
    (pointwise, 1, (1024, 4096)),
    (products, 1, (512, 512)),
    (products, 16, (512, 512)),
    (step_of_moving_parameters, 8, (128, 128)),
    (step_of_moving_parameters, 200, (128, 128)),
)


def make(count: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) * 0.1 for _ in range(count)]


def capture(program: Any, inputs: list[torch.Tensor], pool: Any) -> tuple[Any, list[torch.Tensor]]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, pool=pool):
        results = program(inputs)
    graph.instantiate()
    return graph, results


def ranges_of(inputs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(x.data_ptr(), x.nbytes) for x in inputs]


def times_us(call: Callable[[list[torch.Tensor]], None], sets: Sequence[list[torch.Tensor]], calls: int) -> list[float]:
    """Medians of host time and of synchronized time of a call; the inputs are other tensors each time."""
    host, whole = [], []
    for i in range(calls + 5):
        inputs = sets[i % len(sets)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(inputs)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        if i >= 5:
            host.append((launched - begin) * 1e6)
            whole.append((time.perf_counter() - begin) * 1e6)
    return [round(statistics.median(host), 1), round(statistics.median(whole), 1)]


def bench(program: Any, count: int, shape: tuple[int, ...], calls: int) -> dict[str, Any]:
    driver, pool = Driver(), torch.cuda.graph_pool_handle()
    keep = torch.cuda.CUDAGraph()  # the pool and its segments stay while this graph does
    with torch.cuda.graph(keep, pool=pool):
        kept = torch.zeros(1, device="cuda")
    dtype = torch.bfloat16 if program is products else torch.float32
    writes = program is step_of_moving_parameters
    sets = [make(count, shape, seed, dtype) for seed in range(4)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        program([x.clone() for x in sets[0]])  # workspaces, modules
    torch.cuda.synchronize()
    read, found = [], []
    for inputs in (sets[0], sets[1], sets[0]):  # the first makes the pool's segments; all else is equal after it
        graph, results = capture(program, inputs, pool)
        read.append(driver.read(graph.raw_cuda_graph()))
        found.append(find(read[-1][0], ranges_of(inputs)))
        if len(read) < 3:
            graph.reset()
            del graph, results
    kernels, others = read[2]
    reasons = against(read[2], read[1], found[2], found[1], count)
    row: dict[str, Any] = {
        "program": program.__name__, "inputs": count, "shape": shape, "kernels": len(kernels), "other_nodes": others,
        "words": len(found[2]), "kernels_to_update": len({place.kernel for place in found[2]}),
        "provable": not reasons, "against": reasons[:6], "reasons": len(reasons), "us": {},
    }  # fmt: skip

    # copies: the graph reads `sets[0]`
    def copies(inputs: list[torch.Tensor]) -> None:
        torch._foreach_copy_(sets[0], inputs)
        graph.replay()
        if writes:
            torch._foreach_copy_(inputs, sets[0])

    row["us"]["launch"] = times_us(lambda inputs: graph.replay(), sets[1:], calls)
    row["us"]["copy"] = times_us(copies, sets[1:], calls)
    updates = Updates(driver, graph.raw_cuda_graph_exec(), kernels, found[2])
    ways = {"python": updates.by_ctypes(), "bindings": updates.by_bindings(), "c": updates.by_c()}
    for name, update in ways.items():
        if update is None:
            continue
        row.setdefault("equal", {})[name] = updated_is_equal(program, graph, results, update, sets, writes)

        def updating(inputs: list[torch.Tensor], update: Callable[[Sequence[int]], None] = update) -> None:
            update([x.data_ptr() for x in inputs])
            graph.replay()

        row["us"][name] = times_us(updating, sets[1:], calls)
    if writes:
        begin = time.perf_counter()
        capture(program, sets[1], pool)
        row["us"]["record_again"] = round((time.perf_counter() - begin) * 1e6, 1)
    del kept, keep
    return row


def updated_is_equal(
    program: Any, graph: Any, results: list[torch.Tensor], update: Any, sets: Any, writes: bool
) -> bool:
    """Whether the graph computes with other inputs what eager mode does, while its first inputs are NaN."""
    for x in sets[0]:
        x.fill_(float("nan"))
    equal = True
    for inputs in sets[1:]:
        fresh = [x.normal_().mul_(0.1).clone() for x in inputs]
        expected = program(fresh)
        update([x.data_ptr() for x in inputs])
        graph.replay()
        torch.cuda.synchronize()
        pairs = zip(inputs if writes else results, fresh if writes else expected, strict=True)
        equal = equal and all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in pairs)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path, help="write the result there, row by row")
    options = parser.parse_args()
    result: dict[str, Any] = {**conditions(torch.device("cuda"), calls=options.calls), "rows": []}
    for program, count, shape in PROGRAMS:
        row: dict[str, Any] = {"program": program.__name__, "inputs": count, "shape": shape}
        try:
            row = bench(program, count, shape, options.calls)
        except (DriverError, RuntimeError, AttributeError) as error:  # the others are worth having
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
