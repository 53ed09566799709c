"""A `CaptureDriver` on the CPU that is honest about memory: the tree's mistakes give wrong numbers without a GPU.

    Arena      one buffer with real addresses; first fit; blocks are freed when the storage that owns them dies
    capture    operators are recorded and not run; what they return lies in the arena and holds garbage
    replay     the tape runs on raw memory: what is allocated or freed on the way is scribbled over
    restore    the blocks of a checkpoint, and nothing else, must come out

What the simulator is strict about, CUDA is silent about: an allocated block that nobody accounts for, a restore while
blocks are allocated, memory that is read after it was freed (it is all ones: NaN in every floating type).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only

from cudagraph.step.accumulators import is_alive, node_of
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.torch_private import symbols
from cudagraph.tree.capture import CannotCapture, Owner, capturing
from cudagraph.tree.driver import LAUNCHES_NOTHING
from cudagraph.tree.liveness import layout_of, tensor_on

CPU = torch.device("cpu")
ALIGNMENT = 64
GARBAGE = 0xFF
graveyard: list[torch.Tensor] = []  # buffers that something may still point into
capturing_arenas: list[tuple[Arena, int]] = []  # captures that are under way, with their threads
all_garbage = torch.full((1 << 20,), GARBAGE, dtype=torch.uint8)  # what poisoned storages point to

OUTSIDE, ON_SIDE_STREAM = "made outside of the capture", "made on the stream of captures"  # of accumulators

UNCAPTURABLE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
host_operators: dict[Any, Callable[..., Any]] = {}  # run on the host during the capture; what they call is recorded
FACTORIES = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}
REBINDING = {torch.ops.aten.set_data.default}
WAITS = (torch.ops._c10d_functional.wait_tensor.default,)
_kept: list[Any] = []  # groups of processes


class CaptureError(RuntimeError):
    """Something that can't be captured."""


class OutOfArena(RuntimeError):
    """The arena is full."""


class Graph:
    """On CUDA, up to torch 2.11, the thread that destroys a graph breaks its capture that is under way."""

    def __init__(self, tape: list[Callable[[], None]] | None) -> None:
        self.tape = tape
        self.replays = 0

    def __del__(self) -> None:
        self.reset()

    def replay(self) -> None:
        assert self.tape is not None, "a graph that was reset is replayed"
        self.replays += 1
        with torch.no_grad(), torch.inference_mode(False), torch_cuda.without_autocast():  # no mode reaches a graph
            for step in self.tape:
                step()

    def reset(self) -> None:
        if self.tape is not None:
            for arena, thread in capturing_arenas:
                arena.broken = arena.broken or thread == threading.get_ident()
        self.tape = None


class Arena:
    """A pool: `blocks` that are allocated (address to bytes) and weak references to the storages that own them."""

    def __init__(self, nbytes: int, driver: Simulator | None = None) -> None:
        self.driver = driver
        with torch.inference_mode(False):  # a first call may be in inference mode, and a later one not
            self.buffer = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
        graveyard.append(self.buffer)
        start = self.buffer.data_ptr()
        self.first = start + -start % ALIGNMENT
        self.end = start + nbytes
        self.blocks: dict[int, int] = {}
        self.owners: dict[int, StorageWeakRef] = {}
        self.made: dict[int, StorageWeakRef] = {}  # storages that allocations returned
        self.tape: list[Callable[[], None]] | None = None
        self.launches = 0  # operators that the capture under way, or the last one, recorded
        self.peak = 0  # the most bytes that were allocated at a time
        self.extent = 0  # and how far from the beginning they lay
        self.released = False
        self.broken = False
        self.owner: Owner | None = Owner()
        self.keep_alive: Graph | None = Graph([])  # as on CUDA

    # --- memory

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        self.poll()
        if nbytes == 0:
            return torch_cuda.storage_at(0, CPU, 0)
        size = nbytes + -nbytes % ALIGNMENT
        address = self.first
        for start in sorted(self.blocks):
            if start - address >= size:
                break
            address = start + self.blocks[start]
        if address + size > self.end:
            raise OutOfArena(f"no room for {nbytes} bytes")
        self.blocks[address] = size
        self.peak = max(self.peak, sum(self.blocks.values()))
        self.extent = max(self.extent, address + size - self.first)
        storage = torch_cuda.storage_at(address, CPU, nbytes)
        self.owners[address] = self.made[torch_cuda.identity(storage)] = StorageWeakRef(storage)
        self.note(lambda: self.scribble(address, size))
        return storage

    def poll(self) -> None:
        """Free the blocks whose owners have died."""
        for address in [address for address, owner in self.owners.items() if owner.expired()]:
            del self.owners[address]
            size = self.blocks.pop(address)
            self.note(lambda address=address, size=size: self.scribble(address, size))

    def note(self, step: Callable[[], None]) -> None:
        if self.tape is not None:
            self.tape.append(step)

    def scribble(self, address: int, nbytes: int) -> None:
        self.buffer_at(address, nbytes).fill_(GARBAGE)

    def buffer_at(self, address: int, nbytes: int) -> torch.Tensor:
        offset = address - self.buffer.data_ptr()
        return self.buffer[offset : offset + nbytes]

    def contains(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().nbytes() > 0 and self.first <= x.untyped_storage().data_ptr() < self.end

    # --- Pool

    on_side_stream = staticmethod(contextlib.nullcontext)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        with _Staging(self):
            yield

    def capture(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Graph, Any]:
        self.poll()
        assert self.driver is None or not self.driver.warming, "what is captured would lie in a warm-up's memory"
        assert not self.broken, "a pool is used after a capture in it could not be ended"
        self.mark_accumulators()
        self.tape = tape = []
        self.launches = 0
        capturing_arenas.append((self, threading.get_ident()))
        try:
            with _Capturing(self):
                result = run()
            if self.broken:
                raise CaptureError("operation failed due to a previous error during capture: a graph was destroyed")
            if not self.launches:
                raise CannotCapture(LAUNCHES_NOTHING)
            self.poll()
        except CaptureError:
            self.broken = True  # as on CUDA, where such a capture can't be ended
            raise
        finally:
            self.tape = None
            capturing_arenas.pop()
        return Graph(tape), result

    def mark_accumulators(self) -> None:
        """Mark those that leaves of the step have already: on CUDA they would run on the stream that made them."""
        for x in () if self.driver is None else self.driver.leaves:
            if is_alive(x) and ON_SIDE_STREAM not in node_of(x).metadata:
                node_of(x).metadata[OUTSIDE] = True

    def checkpoint(self) -> dict[int, int]:
        self.poll()
        return dict(self.blocks)

    def restore(self, state: dict[int, int], owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        self.poll()
        assert not self.blocks, f"blocks are allocated between recordings: {self.blocks}"
        addresses = [owner.data_ptr() for owner in owners]
        assert sorted([*addresses, *free]) == sorted(state), "every block of the checkpoint is owned or given back"
        self.blocks = {address: state[address] for address in addresses}
        self.owners = {owner.data_ptr(): StorageWeakRef(owner) for owner in owners}

    def disown(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        assert self.owners.pop(address).cdata == storage._cdata, "only the owner can give a block back"
        del self.blocks[address]

    def owned_by(self, storage: torch.UntypedStorage, *, instead_of: torch.UntypedStorage) -> None:
        """The block that a storage owns is another one's from now on."""
        owner = self.owners.get(instead_of.data_ptr())
        if owner is not None and owner.cdata == instead_of._cdata:
            self.owners[instead_of.data_ptr()] = StorageWeakRef(storage)

    def live_blocks_are(self, addresses: set[int]) -> bool:
        return self.live_blocks() == addresses

    def live_blocks(self) -> set[int]:
        self.poll()
        return set(self.blocks)

    def release(self) -> None:
        self.released = True
        self.owner = self.keep_alive = None
        self.poll()
        kept = {address: self.buffer_at(address, size).clone() for address, size in self.blocks.items()}
        self.buffer.fill_(GARBAGE)
        for address, value in kept.items():  # blocks whose owners are alive, as on CUDA
            self.buffer_at(address, len(value)).copy_(value)


class WarmPool:
    """Memory of warm-ups, which is the process's own here: it tells only what runs in it."""

    def __init__(self, driver: Simulator) -> None:
        self.driver = driver

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.driver.warming.append(self)
        try:
            yield
        finally:
            self.driver.warming.remove(self)


class GatheringPool:
    """Memory of parameters that FSDP2 gathers: the first free block of their size, as in a pool that nobody else uses.

    Nobody can give `resize_` memory on a CPU, so the functions of FSDP2 that call it are others from now on.
    """

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        self.blocks: dict[int, tuple[torch.Tensor, bool]] = {}  # by address: its owner while it is free, is it free
        self.is_on = False
        self.of_torch = _fsdp_param.alloc_storage, _fsdp_param.free_storage
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = self.allocate, self.free

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def allocate(self, x: torch.Tensor) -> None:
        nbytes = x.numel() * x.itemsize
        if not self.is_on or x.untyped_storage().nbytes() == nbytes:
            self.of_torch[0](x)
            return
        free = (owner for owner, is_free in self.blocks.values() if is_free and owner.nbytes == nbytes)
        owner = next(free, torch.full((nbytes,), GARBAGE, dtype=torch.uint8))
        self.blocks[owner.data_ptr()] = owner, False
        torch_cuda.swap_memory(x.untyped_storage(), owner.untyped_storage())

    def free(self, x: torch.Tensor) -> None:
        owner, is_free = self.blocks.get(x.untyped_storage().data_ptr(), (x, True))
        if is_free:
            self.of_torch[1](x)
            return
        address = x.untyped_storage().data_ptr()
        torch_cuda.swap_memory(x.untyped_storage(), owner.untyped_storage())
        owner.fill_(GARBAGE)
        self.blocks[address] = owner, True


def raw(x: torch.Tensor, arena: Arena) -> torch.Tensor:
    """A tensor over the same memory that keeps no block of an arena allocated, nor what the capture was lent."""
    capture = capturing()
    arenas = [arena] if arena.driver is None else arena.driver.pools
    if not any(each.contains(x) for each in arenas) and (
        capture is None or x.untyped_storage().data_ptr() not in capture.held | capture.lent
    ):
        return x.detach()
    storage = x.untyped_storage()
    return tensor_on(torch_cuda.storage_at(storage.data_ptr(), CPU, storage.nbytes()), layout_of(x))


class _Staging(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FACTORIES:
            return func(*args, **(kwargs or {}))
        meta = func(*args, **{**(kwargs or {}), "device": "meta"})
        return tensor_on(self.arena.allocate(meta.untyped_storage().nbytes()), layout_of(meta))


class _Capturing(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode, Dynamo would run the user's code and not what it has compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in _leaves((args, kwargs)):
            if hasattr(x, "trip"):
                x.trip()  # as on CUDA, where no mode is around
        arena = self.arena
        node = torch._C._current_autograd_node()
        if node is not None and "AccumulateGrad" in node.name() and OUTSIDE in node.metadata:
            raise CaptureError("operation would make the legacy stream depend on a capturing blocking stream")
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # marks a region; does nothing to tensors
        if func in host_operators:
            with self:
                return host_operators[func](*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # it calls operators on the tensors inside, which come here again
        if torch_cuda.fake_mode() is not None:
            return func(*args, **kwargs)  # of a DTensor that finds out how its result is spread
        if func.namespace == "c10d":
            return self.collective(func, args, kwargs)
        if func is torch.ops._c10d_functional._wrap_tensor_autograd.default:
            return func(*args, **kwargs)
        if func in WAITS:
            return args[0]  # a replay waits for each collective where it stands
        if func in UNCAPTURABLE:
            raise CaptureError(f"{func} is not permitted when stream is capturing")
        arena.poll()
        returned = func._schema.returns
        if torch.Tag.inplace_view in func.tags or func in REBINDING:
            return func(*args, **kwargs)  # what happens to a tensor object happens at once, and in no replay
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returned):
            return func(*args, **kwargs)  # a view touches no data
        raw_args, raw_kwargs = tree_map_only(torch.Tensor, lambda x: raw(x, arena), (args, kwargs))
        if results := _written(func, args, kwargs):
            arena.launches += 1
            arena.note(lambda: func(*raw_args, **raw_kwargs))
            return None if not returned else results[0] if len(returned) == 1 else tuple(results[: len(returned)])

        meta = _on_meta(func, args, kwargs)
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in _leaves((args, kwargs))):
            return meta

        def place(m: torch.Tensor) -> torch.Tensor:
            return tensor_on(arena.allocate(m.untyped_storage().nbytes()), layout_of(m))

        out = tree_map_only(torch.Tensor, place, meta)
        arena.launches += func not in FACTORIES and any(x.numel() for x in _leaves(out) if isinstance(x, torch.Tensor))
        raw_out = tree_map_only(torch.Tensor, lambda x: raw(x, arena), out)

        def step() -> None:
            values = func(*raw_args, **raw_kwargs)
            if func.namespace == "_c10d_functional":
                values = tree_map_only(torch.Tensor, WAITS[0], values)
            for target, value in zip(_leaves(raw_out), _leaves(values), strict=True):
                # Some kernels return less than they do on a meta tensor: what nobody asked for stays garbage.
                if isinstance(target, torch.Tensor) and value is not None and (value.numel() or not target.numel()):
                    target.copy_(value)

        arena.note(step)
        return out

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an exchange with other processes. Nothing is sent: what is waited for is an exchange with oneself."""
        arena = self.arena
        raw_args, raw_kwargs = tree_map_only(torch.Tensor, lambda x: raw(x, arena), (args, kwargs))

        def step() -> None:
            returned = func(*raw_args, **raw_kwargs)
            (returned[-1] if isinstance(returned, tuple) else returned).wait()

        arena.launches += 1
        arena.note(step)
        # DDP takes its gradients from the work's result.
        own = args[0] if func is torch.ops.c10d.allreduce_.default else [torch.zeros(1)]
        _, work = torch.ops.c10d.allreduce_(own, *_of_one_rank(), None)
        work.wait()  # so that what follows it runs in this thread, and is recorded
        return work if len(func._schema.returns) == 1 else (args[0], work)


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@functools.cache
def _of_one_rank() -> tuple[Any, Any]:
    """A group of this process alone, which no other group knows, and a sum, as `c10d.allreduce_` takes them."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=10))
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _kept.append(group)
    with _Noting() as noting:
        group.allreduce([torch.zeros(1)]).wait()
    (_, args), *_ = [call for call in noting.calls if call[0] is torch.ops.c10d.allreduce_.default]
    return args[1], args[2]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    named = [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [value for name, value in named if name in written]


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives for the same arguments on the meta device."""

    def on_meta(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    leaves = _leaves((args, kwargs))
    args, kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    if any(isinstance(x, torch.device) for x in leaves):
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
    elif "device" in kwargs or not any(isinstance(x, torch.Tensor) for x in leaves):
        kwargs = {**kwargs, "device": "meta"}
    if "generator" in kwargs:
        kwargs = {**kwargs, "generator": None}
    return func(*args, **kwargs)


def _leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


class Simulator:
    """The driver. `poisoned` tells what was poisoned where this torch can't make reads fail; see `read`."""

    device_type = "cpu"

    def __init__(self, arena_bytes: int = 1 << 20, *, moves: str = "all") -> None:
        """`moves`: which storages can be pointed elsewhere: "all", or "made", those that an allocation returned (as on
        CUDA before torch 2.13). A torch without the means for it can move none."""
        self.arena_bytes = arena_bytes
        self.moves = moves
        self.can_move = torch_cuda.can_swap()
        self.pools: list[Arena] = []
        self.poisoned: dict[int, tuple[StorageWeakRef, str]] = {}
        self.current_stream = 0
        self.ordered: list[tuple[Any, int]] = []
        self.copied_out = 0
        self.warming: list[WarmPool] = []  # those that allocations are routed to
        self.warm_pools: list[weakref.ref[WarmPool]] = []
        self.leaves: list[torch.Tensor] = []  # of the step that is captured next
        self.is_idle = True  # operators are done when they return
        self.refusal: str | None = None  # why nothing can be captured

    def open_pool(self, device: torch.device) -> Arena:
        self.pools.append(Arena(self.arena_bytes, self))
        return self.pools[-1]

    def open_warm_pool(self, device: torch.device) -> WarmPool:
        assert not self.warming, "a warm-up's memory is opened in a warm-up"
        pool = WarmPool(self)
        self.warm_pools.append(weakref.ref(pool))
        return pool

    def open_gathering_pool(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return GatheringPool() if torch_cuda.can_swap() else contextlib.nullcontext

    def why_not(self) -> str | None:
        return self.refusal

    def stream(self, device: torch.device) -> Callable[[], int]:
        return lambda: self.current_stream

    def order_streams(self, device: torch.device, before: Any) -> Any:
        self.ordered.append((before, self.current_stream))
        return self.current_stream

    def idle_and_finish(self, device: torch.device | None) -> tuple[Callable[[], bool], Callable[[], None]]:
        return lambda: self.is_idle, lambda: None

    def let_wait(self, stream: Any, other: Any) -> None:
        self.ordered.append((other, stream))

    def launcher(self, graph: Graph) -> Callable[[], None]:
        return graph.replay

    def can_copy_out(self, storage: torch.UntypedStorage) -> bool:
        made = any(storage._cdata in pool.made for pool in self.pools)
        return self.can_move and (self.moves == "all" or made)

    def copy_out(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        made = []
        for storage in storages:
            assert self.can_copy_out(storage), "what can't be pointed elsewhere is"
            self.copied_out += 1
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8)
            fresh.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)))
            made.append(fresh.untyped_storage())
            for pool in self.pools:
                pool.owned_by(made[-1], instead_of=storage)
            torch_cuda.swap_memory(storage, made[-1])
        return made

    def poison(self, storage: torch.UntypedStorage, message: str) -> None:
        if symbols.has("torch._C._set_storage_data_ptr_access_error_msg"):
            torch_cuda.poison(storage, message)
            return
        self.poisoned = {cdata: entry for cdata, entry in self.poisoned.items() if not entry[0].expired()}
        self.poisoned[storage._cdata] = StorageWeakRef(storage), message
        if torch_cuda.can_swap():
            assert storage.nbytes() <= all_garbage.nbytes
            torch_cuda.swap_memory(storage, torch_cuda.storage_at(all_garbage.data_ptr(), CPU, storage.nbytes()))

    event = staticmethod(torch.cpu.Event)

    def is_capture_error(self, error: BaseException) -> bool:
        return isinstance(error, CaptureError)

    def is_capturing(self) -> bool:
        return any(pool.tape is not None for pool in self.pools)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`; raises if it is poisoned, also where torch itself can't."""
        owner, message = self.poisoned.get(x.untyped_storage()._cdata, (None, ""))
        if owner is not None and not owner.expired():
            raise RuntimeError(message)
        return x.detach().clone()
