"""Autograd: each thread's stack of saved-tensor hooks, numbers of operators, the end of a backward (2.11 to 2.15).

The stack's part goes when torch has a public reader of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from cudagraph.torch_private.symbols import late

from .dynamo import untraced
from .symbols import need
from .values import no_autocast, pytree, without_modes

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]
push: Callable[[_Pack, _Unpack], None] = need("torch._C._autograd._push_saved_tensors_default_hooks")
pop: Callable[[], None] = need("torch._C._autograd._pop_saved_tensors_default_hooks")
_top = need("torch._C._autograd._top_saved_tensors_default_hooks")
_disable = need("torch._C._autograd._saved_tensors_hooks_disable")
_reentrant_forward = need("torch.utils.checkpoint.CheckpointFunction.forward")
# the number that autograd will give to its next node on this thread
next_sequence_number: Callable[[], int] = late("torch._C._autograd._get_sequence_nr")
# whether the backward that runs on this thread may run again (`retain_graph`); True outside of a backward
keeps_graph: Callable[[], bool] = late("torch._C._autograd._get_current_graph_task_keep_graph")
# the number of the backward that runs on this thread; -1 outside of one
current_backward: Callable[[], int] = late("torch._C._current_graph_task_id")

# Why hooks are disabled on this thread (`disable_saved_tensors_hooks`); None if they are not.
disabled_because: Callable[[], str | None] = need("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message")

# Undoes a `disable_saved_tensors_hooks` whose end an exception has skipped. Dynamo leaves hooks disabled for the thread
# when it can't trace a torch.func transform inside a context, and from then on torch refuses every hook, activation
# checkpointing's too. Goes when Dynamo puts this back itself.
allow_hooks: Callable[[], None] = need("torch._C._autograd._saved_tensors_hooks_enable")


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost hook pair of this thread, also while tracing."""
    return _top(True)


def is_checkpointed() -> bool:
    """Whether the innermost hook pair of this thread is that of `torch.utils.checkpoint`, around a call that it saves
    nothing for, or computes again."""
    top = top_hooks()
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def in_reentrant_forward() -> bool:
    """Whether this thread runs the forward of a checkpoint with `use_reentrant=True`, which saves nothing."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _reentrant_forward.__code__:
        frame = frame.f_back
    return frame is not None


def _as_it_is(x: Any) -> Any:
    return x


def covered_hooks() -> contextlib.AbstractContextManager[None]:
    """A pair of plain functions covers the hooks in force: torch would inline these a second time.

    An empty stack stays empty: torch.func's transforms trace on an empty stack only.
    """
    return contextlib.nullcontext() if top_hooks() is None else innermost_hooks()


@contextlib.contextmanager
def innermost_hooks(pack: _Pack = _as_it_is, unpack: _Unpack = _as_it_is) -> Iterator[None]:
    """A pair of functions as the innermost hooks of this thread, also where hooks are disabled."""
    before = show_hooks(pack, unpack)
    try:
        yield
    finally:
        # what is traced inside may disable hooks, and fail before it allows them again
        hide_hooks(before)


def show_hooks(pack: _Pack = _as_it_is, unpack: _Unpack = _as_it_is) -> str | None:
    """Push a pair of functions, and allow hooks until `hide_hooks`; returns why hooks were disabled.

    Works inside `torch.autograd.graph.disable_saved_tensors_hooks` too, where torch refuses a push.
    """
    before = disabled_because()
    if before is not None:
        allow_hooks()
    push(pack, unpack)
    return before


def hide_hooks(before: str | None) -> None:
    pop()
    _disable_or_allow(before)


def call_without_hooks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    why: str = "aot_hooks: the hooks of this region are inlined in its graphs",
) -> Any:
    """`fn(*args)` with the hooks of this thread disabled; written flat because every call runs it."""
    before = disabled_because()
    _disable(why, False)
    try:
        return fn(*args)
    finally:
        _disable_or_allow(before)


def _disable_or_allow(why: str | None) -> None:
    """Disable the hooks of this thread for the reason `why`; allow them if it is None."""
    if why is None:
        allow_hooks()
    else:
        _disable(why, False)


def filtering_mode() -> str | None:
    """torch's setting for the scope of its own contexts; None if nobody has changed it."""
    mode = need("torch._functorch.config").saved_tensors_hooks_filtering_mode
    return None if mode == "donated" else str(mode)


def sequence_number(node: Any) -> int:
    """The number of a node of autograd's graph, ascending in the order in which a thread's operators ran."""
    return int(node._sequence_nr())


def softmax_dimension(x: torch.Tensor) -> int | None:
    """The dimension along which the numbers of `x` add up to one, if a softmax has made it."""
    node: Any = x.grad_fn
    if node is None or node.name() not in ("SoftmaxBackward0", "SafeSoftmaxBackward0") or x.dim() == 0:
        return None
    return int(node._saved_dim + (1 << 63)) % (1 << 64) - (1 << 63)  # torch gives it without its sign


def norm_groups(node: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """`shape`, that of a norm's input, in groups with a mean of their own, and the dimensions of a group.

    None if `node` is no norm that subtracts a mean, or one that takes mean and variance from elsewhere.
    """
    kind = node.name().removesuffix("Backward0")
    if kind == "NativeLayerNorm":
        return tuple(shape), tuple(range(len(shape) - len(node._saved_normalized_shape), len(shape)))
    if kind == "NativeGroupNorm":
        split = (shape[0], node._saved_group, shape[1] // node._saved_group, *shape[2:])
        return split, tuple(range(2, len(split)))
    if kind in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm") and node._saved_training:
        return tuple(shape), (0, *range(2, len(shape)))
    return None


# --- what the nodes of eager code have saved --------------------------------------------------------------------------

# the node whose backward runs on this thread; None outside of a backward
current_node: Callable[[], Any] = late("torch._C._current_autograd_node")
_PLAIN = (bool, int, float, str, type(None))


_names_of: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}


def _attributes(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The attributes in which C++ nodes of this type have saved tensors, and those with anything else."""
    found = _names_of.get(type(node))
    if found is None:
        names = [name for name in dir(node) if name.startswith(("_raw_saved_", "_saved_"))]
        tensors = tuple(name for name in names if name.startswith("_raw_saved_"))
        shown = {name.replace("_raw", "", 1) for name in tensors}
        others = tuple(name for name in names if name.startswith("_saved_") and name not in shown)
        found = _names_of[type(node)] = tensors, others
    return found


def is_python_node(node: Any) -> bool:
    """Whether `node` is that of a `torch.autograd.Function`, whose backward is a Python function."""
    return isinstance(node, need("torch._C._FunctionBase"))


INPUT = "_raw_saved_input"  # the attribute for the input of a norm


def packed_by(node: Any) -> dict[tuple[str, int], Any]:
    """What the pack hooks returned for the tensors that `node` has saved; {} if they are released.

    Every generated node has an attribute for each saved tensor or list of them. The keys are the attribute and the
    position in the list. The value is a `SavedTensor`, whose `data` is what its hook returned (2.11 to 2.15).
    """
    found: dict[tuple[str, int], Any] = {}
    names = ("_raw_saved_tensors",) if is_python_node(node) else _attributes(node)[0]
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # the backward has run
            return {}
        several = raw if isinstance(raw, tuple | list) else (raw,)
        data = ((i, each.data) for i, each in enumerate(several) if each is not None)
        found.update(((name, i), packed) for i, packed in data if packed is not None)
    return found


def plain_values(node: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and texts that a C++ `node` has saved, such as an exponent; not sizes."""
    values = ((name, getattr(node, name)) for name in _attributes(node)[1] if "sym_" not in name)
    return tuple((name, value) for name, value in values if isinstance(value, _PLAIN))


def results_of(node: Any) -> list[Any]:
    """What autograd knows of the operator's results: objects with `shape`, `dtype` and `device`."""
    return list(node._input_metadata)


def makes_nested(node: Any) -> bool:
    """Whether a result of the operator is a nested tensor. Torch may raise if it is asked for the shape of one."""
    return any(each.is_nested_tensor for each in node._input_metadata)


@contextlib.contextmanager
def fake_operators() -> Iterator[None]:
    """Operators run on fake tensors, without autograd, autocast, hooks, and modes that the program has on."""
    mode = need("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True)
    with without_modes(), torch.no_grad(), no_autocast(), mode:
        yield


# --- when saved tensors are released ----------------------------------------------------------------------------------
#
#   outputs --grad_fn, through views--> the graph's autograd node --+-- has run -------+--> on_release(), once
#                                                                   +-- is collected --+
#
# A node has run when the next one on its thread begins, or when the pass ends. A hook that autograd calls after a node
# would tell it at once, but for such a hook it holds the node's gradients while the node runs.


class _Token:
    """An object that only an autograd node, or the pass that runs it, holds."""


class _Pass:
    """A backward pass on one thread, as autograd's callback for its end, which autograd drops if the pass fails."""

    def __init__(self) -> None:
        self.node = 0  # the `id` of the node that runs
        self.waiting: list[tuple[Callable[[], None], _Token]] = []  # what to call when it has run, with tokens of it

    def begins(self, node: int, call: Callable[[], None], token: _Token) -> None:
        """Node number `node` begins. So the one before it has run, and its calls are made."""
        if node != self.node:
            self()
            self.node = node
        self.waiting.append((call, token))

    @untraced
    def __call__(self) -> None:
        ended, self.waiting = self.waiting, []
        for call, _ in ended:
            call()


_passes: weakref.WeakValueDictionary[tuple[int, int], _Pass] = weakref.WeakValueDictionary()  # by number and thread


def at_end_of_backward(
    outputs: Any,
    on_release: Callable[[], None],
    on_run: Callable[[], None] | None = None,
    on_begin: Callable[[bool], None] = lambda retains: None,
) -> bool:
    """Call `on_release` once when the saved tensors of the graph that returned `outputs` are released.

    False if it saved nothing.

    Args:
        on_run: called in place of `on_release` when the backward has run for the first time.
        on_begin: called when that backward begins: with whether it keeps the saved tensors (`retain_graph=True`).
    """
    if (node := node_behind(outputs)) is None:
        return False
    token = _Token()
    once = weakref.finalize(token, on_release)
    node.register_prehook(functools.partial(_begins, id(node), token, once, on_run or on_release, on_begin))
    return True


@untraced  # a backward may run where Dynamo compiles each function that is called
def _begins(
    node: int,
    token: _Token,
    once: weakref.finalize[..., Any],
    call: Callable[[], None],
    on_begin: Callable[[bool], None],
    *_: Any,
) -> None:
    """The backward of the node begins: `call` comes when it has run. See `at_end_of_backward` for the arguments."""
    if not once.alive:  # it runs again
        return
    on_begin(keeps_graph())

    def ended() -> None:
        if once.detach() is not None:
            call()

    if in_compiled_autograd():  # calls nothing when a pass ends
        return ended()
    key = current_backward(), threading.get_ident()
    if (found := _passes.get(key)) is None:
        _passes[key] = found = _Pass()
        need("torch.autograd.Variable._execution_engine").queue_callback(found)
    found.begins(node, ended, token)


def node_behind(outputs: Any) -> Any:
    """The autograd node of the compiled graph behind a tensor in `outputs`, or behind its view's base; None without.

    A result may be a buffer that AOTAutograd has copied the graph's output into: the source is the last of a copy's
    inputs.

    AOTAutograd makes a class for each graph, which alone has an `_aot_id` (2.11 to 2.15).
    """
    for x in pytree.tree_leaves(outputs):
        node = x.grad_fn if isinstance(x, torch.Tensor) else None
        while node is not None and not hasattr(getattr(node, "_forward_cls", None), "_aot_id"):
            node = node.next_functions[-1][0] if node.next_functions else None
        if node is not None:
            return node
    return None


# --- a backward that runs a second time, without hooks ----------------------------------------------------------------


def in_compiled_autograd() -> bool:
    """Whether the backward that runs is one that torch compiles as a whole."""
    return bool(need("torch._dynamo.compiled_autograd").in_compiled_autograd_region)


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Have autograd call `call` when the backward pass that runs has ended. It is dropped if the pass fails."""
    need("torch.autograd.Variable._execution_engine").queue_callback(untraced(call))


class Rerun:
    """The backward of one autograd node, by itself, as often as it is called.

    `leaves`: tensors that it has gradients for. They only tell autograd that it must run the node.
    """

    def __init__(self, node: Any, leaves: Sequence[torch.Tensor]) -> None:
        self.node, self.leaves = node, leaves
        self._found: tuple[torch.Tensor | None, ...] = ()

    def _note(self, inputs: tuple[torch.Tensor | None, ...], _outputs: Any) -> None:
        self._found = inputs

    def __call__(self, incoming: Sequence[torch.Tensor | None], *, keep: bool) -> tuple[torch.Tensor | None, ...]:
        """The gradients that the node passes on, by position, for those that come in. `keep`: it may run again."""
        edges = [torch.autograd.graph.GradientEdge(self.node, i) for i, g in enumerate(incoming) if g is not None]
        given = [g for g in incoming if g is not None]
        handle = self.node.register_hook(self._note)  # for this call only: the node would keep what it has saved alive
        try:
            torch.autograd.grad(edges, self.leaves, given, retain_graph=keep, allow_unused=True)
        finally:
            handle.remove()
        found, self._found = self._found, ()
        return found
