"""The operations of the device, which allocates, captures and replays; the memory pool of one tree.

Between two recordings no block of a pool is allocated: graphs have the addresses that they use, and the tree keeps
track of the memory of outputs. A recording that continues a path first restores the blocks allocated at its end.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda
from .capture import CannotCapture, Owner
from .liveness import as_bytes

LAUNCHES_NOTHING = "it launches nothing on the device, so the CUDA graph would be empty"
EMPTY_WARNING = "The CUDA Graph is empty"
# Parts of the messages of CUDA and torch about an operation that is not allowed in a capture.
CAPTURE_ERRORS = (
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation would make the legacy stream depend on a capturing blocking stream",
    "captures_underway",
    "during CUDA graph capture",
    "during graph capture",
    "during capturing stage",
    "cudaErrorStreamCapture",
)


class Pool(torch_cuda.PrivatePool):
    """The memory that all recordings of a tree share: a private pool of the caching allocator.

    The allocator reuses a block only on the stream that it was made for, so all graphs are recorded on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        # A capture could not be ended, or left memory allocated: nothing more is recorded in the pool.
        self.broken = False
        self.owner: Owner | None = Owner()  # lives as long as the recordings in the pool; see capture.py
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self.side_stream = torch.cuda.Stream()
            super().__init__(torch.cuda.current_device(), torch.cuda.graph_pool_handle())
            # A pool lives as long as one of its graphs.
            self.keep_alive: torch.cuda.CUDAGraph | None = self._empty_graph(self.handle)

    def _empty_graph(self, handle: Any, generators: Sequence[torch.Generator] = ()) -> torch.cuda.CUDAGraph:
        graph = _graph_with(generators)
        with warnings.catch_warnings(), torch.cuda.stream(self.side_stream):
            warnings.filterwarnings("ignore", message=EMPTY_WARNING)
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            graph.capture_end()
        return graph

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """A context whose work is on the stream of captures, after the current stream's and before what follows."""
        with torch.cuda.device(self.device):
            outside = torch.cuda.current_stream()
            self.side_stream.wait_stream(outside)
            try:
                with torch.cuda.stream(self.side_stream):
                    yield
            finally:
                outside.wait_stream(self.side_stream)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """A context whose allocations come from the pool. Its work is ordered after the current stream's."""
        with self.on_side_stream(), self.routed():
            yield

    def capture(self, run: Callable[[], list[Any]], generators: Sequence[torch.Generator]) -> tuple[Any, list[Any]]:
        """Record the work of `run` without doing it. Returns a graph with `replay()` and `reset()`, and `run`'s result.

        If `run` raises, or does something that can't be captured, only the memory that the exception keeps alive is
        left. Raises `CannotCapture` if `run` launched nothing.
        """
        with torch.cuda.device(self.device):
            # All launched work is done, and cached blocks of the ordinary pool are given back for this one.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            graph = _graph_with(generators)
            # A library's cached workspace would stay in the pool, where the next recording overwrites it.
            torch_cuda.clear_cublas_workspaces()
            try:
                with torch.random.fork_rng([self.device]), self.on_side_stream():
                    graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                    try:
                        result = run()
                    except BaseException:
                        with contextlib.suppress(RuntimeError):  # the capture itself was broken, by what is raised here
                            self._end(graph, generators)
                            graph.reset()
                        raise
                    is_empty = self._end(graph, generators)
                if is_empty:
                    graph.reset()
                    raise CannotCapture(LAUNCHES_NOTHING)
            finally:
                torch_cuda.clear_cublas_workspaces()
            return graph, result

    def _end(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> bool:
        """End the capture, and return whether it is empty, which torch only says in a warning.

        If it can't be ended, torch believes that it goes on, so the pool can't be captured into again. Then allocations
        are no longer routed to the pool, and a complete, empty capture tells generators that the broken one is over.
        """
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                graph.capture_end()
        except RuntimeError:
            self.broken = True
            self.stop_routing()
            torch.cuda.synchronize()
            self._empty_graph(torch.cuda.graph_pool_handle(), generators).reset()
            raise
        others = [warning for warning in caught if EMPTY_WARNING not in str(warning.message)]
        for warning in others:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return len(others) < len(caught)

    disown = staticmethod(torch_cuda.free_keeping_address)

    def release(self) -> None:
        """Give the memory back as soon as no graph uses it."""
        self.keep_alive = self.owner = None


def _graph_with(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


def _kept_pool(device: torch.device) -> torch_cuda.PrivatePool:
    """A pool of the caching allocator that lives as long as the object."""
    with torch.cuda.device(device):
        pool = torch_cuda.PrivatePool(torch.cuda.current_device(), torch.cuda.graph_pool_handle())
    pool.keep()
    return pool


class CaptureDriver:
    """The operations of a device that a tree needs, on CUDA. Tests have a simulator with the same methods."""

    device_type = "cuda"  # of the devices that it captures for
    open_pool = staticmethod(Pool)

    def open_warm_pool(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A pool for warm-ups of training. In the context that it makes, this thread's allocations come from the pool.
        Its free memory is given back when the last reference to it goes: before the next such pool or capture."""
        pool = _kept_pool(device)

        @contextlib.contextmanager
        def allocating() -> Iterator[None]:
            # While allocations go to a pool, running out of memory does not free cached blocks.
            torch.cuda.empty_cache()
            try:
                with pool.routed():
                    yield
            finally:
                # A library's cached workspace would keep its segment of the pool as long as the process lives.
                torch_cuda.clear_cublas_workspaces()

        return allocating

    def open_gathering_pool(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A pool for parameters that are gathered in each step. In the context that it makes, this thread's allocations
        come from the pool. It keeps its memory, so the same allocations in the same order get the same addresses."""
        pool, lock = _kept_pool(device), threading.Lock()

        @contextlib.contextmanager
        def allocating() -> Iterator[None]:
            # The graph of a whole step has a pool of its own; and only one thread may allocate from this one.
            if torch.cuda.is_current_stream_capturing() or not lock.acquire(blocking=False):
                yield
                return
            try:
                with pool.routed():
                    yield
            finally:
                lock.release()

        return allocating

    def why_not(self) -> str | None:
        """Why nothing can be captured in this process; None if captures are possible."""
        allocator = torch.cuda.get_allocator_backend()
        if allocator != "native":
            return (
                f"memory comes from the allocator {allocator!r}, which can't put a pool back to what it was; leave "
                "'backend' out of PYTORCH_CUDA_ALLOC_CONF, and torch's allocator as it is"
            )
        if torch_cuda.caches_memory():
            return None
        return "torch's allocator caches no memory, so there are no pools; unset PYTORCH_NO_CUDA_MEMORY_CACHING"

    stream = staticmethod(torch_cuda.raw_stream)

    def order_streams(self, device: torch.device, before: Any) -> Any:
        """Let the current stream wait for the stream `before` (None: for nothing), and return the current one."""
        now = torch.cuda.current_stream(device)
        if before is not None:
            now.wait_stream(before)
        return now

    def idle_and_finish(self, device: torch.device | None) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Two functions that any thread may call: one tells whether the current stream of `device` has done its work,
        the other one waits for the device. `device`: None for the current one. Without CUDA it is never idle."""
        if not torch.cuda.is_available():
            return lambda: False, lambda: None
        stream = torch.cuda.current_stream(device)
        return stream.query, functools.partial(torch.cuda.synchronize, stream.device)

    let_wait = staticmethod(torch.cuda.Stream.wait_stream)  # a stream waits for what another has been given so far
    launcher = staticmethod(torch_cuda.bare_replay)  # the fastest function that replays a graph
    poison = staticmethod(torch_cuda.poison)
    event = staticmethod(torch.cuda.Event)
    is_capturing = staticmethod(torch.cuda.is_current_stream_capturing)  # in this thread, for a tree or not

    def can_copy_out(self, storage: torch.UntypedStorage) -> bool:
        """Whether `copy_out` can move the tensors on `storage`."""
        return torch_cuda.can_swap() or storage.resizable()

    def copy_out(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Move the contents of `storages` to memory of their own. Every tensor on them follows. Returns storages that
        own the old memory in their place; none where torch can't exchange the memory of storages (before 2.13)."""
        if not storages:
            return []
        if not torch_cuda.can_swap():
            for storage in storages:
                storage.resize_(storage.nbytes())  # allocates, copies and points there
            return []
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(storages[0].device):
            old = [as_bytes(storage) for storage in storages]
            new = [torch.empty_like(x) for x in old]
            torch_cuda.foreach_copy(new, old)
        for storage, copy in zip(storages, new, strict=True):
            torch_cuda.swap_memory(storage, copy.untyped_storage())
        return [copy.untyped_storage() for copy in new]

    def is_capture_error(self, error: BaseException) -> bool:
        """Whether `error` means that an operation can't be captured, and not that the program is wrong."""
        return isinstance(error, RuntimeError) and any(sign in str(error) for sign in CAPTURE_ERRORS)


@functools.cache
def cuda_driver() -> CaptureDriver:
    return CaptureDriver()
