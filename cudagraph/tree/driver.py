"""The interface between the tree and the device, which allocates, captures and replays.

    tree, record -> CaptureDriver -> Pool -+- CUDA: the caching allocator's private pool, a side stream, CUDAGraph
                                           +- tests: a simulator on the CPU

Between two recordings no block of a pool is allocated: graphs have the addresses that they use, and the tree keeps
track of the memory of outputs. A recording that continues a path first restores the blocks that were allocated at its
end.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ..torch_private import cuda as torch_cuda
from .capture import CannotCapture
from .liveness import bytes_of

__all__ = ["LAUNCHES_NOTHING", "CaptureDriver", "CudaDriver", "Pool", "cuda_driver"]

T = TypeVar("T")

LAUNCHES_NOTHING = "it launches nothing on the device, so the CUDA graph would be empty"


class Pool(Protocol):
    """Memory that recordings of one tree share."""

    def staging(self) -> contextlib.AbstractContextManager[None]:
        """A context whose allocations come from the pool. Its work is ordered after the current stream's."""

    def capture(self, run: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Any, T]:
        """Record the work of `run` without doing it. Returns a graph with `replay()` and `reset()`, and `run`'s result.

        Allocations come from the pool. If `run` raises, or does something that can't be captured, only the memory that
        the exception keeps alive is left. Raises `CannotCapture` if `run` launched nothing.
        """

    def checkpoint(self) -> Any:
        """The state of the pool: which blocks are allocated now."""

    def restore(self, state: Any, owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        """Allocate the blocks of `state`. `owners` own theirs from now on; the blocks at `free` are freed."""

    def disown(self, storage: torch.UntypedStorage) -> None:
        """Free the block that `storage` owns. The storage keeps its address."""

    def live_blocks_are(self, addresses: set[int]) -> bool:
        """Whether exactly the blocks at `addresses` are allocated."""

    def live_blocks(self) -> set[int]:
        """The addresses of all allocated blocks."""

    def release(self) -> None:
        """Give the memory back as soon as no graph uses it."""

    @property
    def broken(self) -> bool:
        """Whether a capture could not be ended, so that nothing more can be recorded in this pool."""


class CaptureDriver(Protocol):
    """The operations of a device that a tree needs.

    Attributes:
        device_type: the type of the devices that it captures for, such as "cuda".
    """

    device_type: str

    def open_pool(self, device: torch.device) -> Pool: ...

    def open_warm_pool(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A pool for warm-ups of training. In the context that it makes, this thread's allocations come from the pool.

        Its free memory is given back when the last reference to it goes: at the latest before the next such pool is
        used, and before the next capture.
        """

    def why_not(self) -> str | None:
        """Why nothing can be captured in this process; None if captures are possible."""

    def stream(self, device: torch.device) -> Callable[[], int]:
        """A function that returns the number of the current stream."""

    def order_streams(self, device: torch.device, before: Any) -> Any:
        """Let the current stream wait for the stream `before` (None: for nothing), and return the current one."""

    def let_wait(self, stream: Any, other: Any) -> None:
        """Let `stream` wait for the work launched on `other` so far."""

    def launcher(self, graph: Any) -> Callable[[], None]:
        """The fastest function that replays `graph`."""

    def can_copy_out(self, storage: torch.UntypedStorage) -> bool:
        """Whether `copy_out` can move the tensors on `storage`."""

    def copy_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Move the contents of `storages` to memory of their own. Every tensor on them follows."""

    def poison(self, storage: torch.UntypedStorage, message: str) -> None:
        """Let each read of a tensor on `storage` raise a `RuntimeError` with `message`."""

    def is_capture_error(self, error: BaseException) -> bool:
        """Whether `error` means that an operation can't be captured, and not that the program is wrong."""

    def is_capturing(self) -> bool:
        """Whether this thread captures a graph, for a tree or not."""


class CudaPool:
    """The private pool of the caching allocator, and the stream that all its graphs are recorded on.

    The allocator reuses a block only on the stream that it was made for, so all recordings use one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.broken = False
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self.side_stream = torch.cuda.Stream()
            self.pool = torch_cuda.PrivatePool(torch.cuda.current_device(), torch.cuda.graph_pool_handle())
            # A pool lives as long as one of its graphs.
            self.keep_alive: torch.cuda.CUDAGraph | None = self._empty_graph(self.pool.handle)

    def _empty_graph(self, handle: Any, generators: Sequence[torch.Generator] = ()) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with _quietly(), torch.cuda.stream(self.side_stream):
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            graph.capture_end()
        return graph

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
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
        with self._on_side_stream(), self.pool.routed():
            yield

    def capture(self, run: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Any, T]:
        with torch.cuda.device(self.device):
            # All launched work is done, and cached blocks of the ordinary pool are given back for this one.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            states = torch.get_rng_state(), torch.cuda.get_rng_state()
            # A library's cached workspace would stay in the pool, where the next recording overwrites it.
            torch_cuda.clear_cublas_workspaces()
            try:
                with self._on_side_stream():
                    graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
                    try:
                        result = run()
                    except BaseException:
                        self._abandon(graph, generators)
                        raise
                    try:
                        is_empty = _ended_empty(graph)
                    except RuntimeError:
                        self._heal(generators)
                        raise
                if is_empty:
                    graph.reset()
                    raise CannotCapture(LAUNCHES_NOTHING)
            finally:
                torch_cuda.clear_cublas_workspaces()
                torch.set_rng_state(states[0])
                torch.cuda.set_rng_state(states[1])
            return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # the capture itself was broken; the caller raises the error that broke it
            self._heal(generators)
        else:
            graph.reset()

    def _heal(self, generators: Sequence[torch.Generator]) -> None:
        """Clean up after a capture that could not be ended, which torch believes to be under way.

        Allocations are no longer routed to the pool, which can't be captured into again. Another, complete capture
        tells generators that the broken one is over.
        """
        self.broken = True
        self.pool.stop_routing()
        torch.cuda.synchronize()
        self._empty_graph(torch.cuda.graph_pool_handle(), generators).reset()

    def checkpoint(self) -> Any:
        return self.pool.checkpoint()

    def restore(self, state: Any, owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        self.pool.restore(state, owners, free)

    def disown(self, storage: torch.UntypedStorage) -> None:
        torch_cuda.free_keeping_address(storage)

    def live_blocks_are(self, addresses: set[int]) -> bool:
        return self.pool.live_blocks_are(addresses)

    def live_blocks(self) -> set[int]:
        return self.pool.live_blocks()

    def release(self) -> None:
        self.keep_alive = None


def _ended_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture, and return whether it is empty, which torch only says in a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    empty = [warning for warning in caught if "The CUDA Graph is empty" in str(warning.message)]
    for warning in caught:
        if warning not in empty:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return bool(empty)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class CudaDriver:
    """Captures with torch's `CUDAGraph`."""

    device_type = "cuda"

    def open_pool(self, device: torch.device) -> Pool:
        return CudaPool(device)

    def open_warm_pool(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        with torch.cuda.device(device):
            pool = torch_cuda.PrivatePool(torch.cuda.current_device(), torch.cuda.graph_pool_handle())
        pool.keep()

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

    def why_not(self) -> str | None:
        allocator = torch.cuda.get_allocator_backend()
        if allocator == "native":
            if torch_cuda.caches_memory():
                return None
            return "torch's allocator caches no memory, so there are no pools; unset PYTORCH_NO_CUDA_MEMORY_CACHING"
        return (
            f"memory comes from the allocator {allocator!r}, which can't put a pool back to what it was; leave "
            "'backend' out of PYTORCH_CUDA_ALLOC_CONF, and torch's allocator as it is"
        )

    def stream(self, device: torch.device) -> Callable[[], int]:
        return torch_cuda.raw_stream(device.index)

    def order_streams(self, device: torch.device, before: Any) -> Any:
        now = torch.cuda.current_stream(device)
        if before is not None:
            now.wait_stream(before)
        return now

    def let_wait(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    def launcher(self, graph: Any) -> Callable[[], None]:
        return torch_cuda.bare_replay(graph)

    def can_copy_out(self, storage: torch.UntypedStorage) -> bool:
        return torch_cuda.can_swap() or storage.resizable()

    def copy_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        if not storages:
            return
        if not torch_cuda.can_swap():
            for storage in storages:
                storage.resize_(storage.nbytes())  # allocates, copies and points there
            return
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(storages[0].device):
            old = [bytes_of(storage) for storage in storages]
            new = [torch.empty_like(x) for x in old]
            torch_cuda.foreach_copy(new, old)
        for storage, copy in zip(storages, new, strict=True):
            torch_cuda.swap_memory(storage, copy.untyped_storage())

    def poison(self, storage: torch.UntypedStorage, message: str) -> None:
        torch_cuda.poison(storage, message)

    def is_capture_error(self, error: BaseException) -> bool:
        text = str(error)
        return isinstance(error, RuntimeError) and any(sign in text for sign in CAPTURE_ERRORS)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


# Parts of the messages of CUDA and torch about an operation that is not allowed in a capture.
CAPTURE_ERRORS = (
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation would make the legacy stream depend on a capturing blocking stream",
    "during CUDA graph capture",
    "during graph capture",
    "during capturing stage",
    "cudaErrorStreamCapture",
    "captures_underway",
)


@functools.cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()
