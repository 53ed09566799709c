"""The same hooks where torch runs eagerly: graph breaks, `force_eager`, code outside compile.

Autograd calls `pack_eager(setting, x)` for each tensor it saves and keeps the `Kept` it gets; in the backward
`unpack_eager(kept)` gives the tensor back. Scope "donated" must mean what it means in a graph:

      saved x:   no grad_fn (leaf, parameter, buffer, mask)          -> kept
                 view of a leaf (weight.t())                          -> kept
                 given to the outermost module or compiled function   -> kept
                 returned by it                                       -> kept
                 anything else                                        -> packed

Whether x will be returned is not known when it is saved. A tensor that dies while the outermost module still runs was
not returned, so x waits, held by the user anyway, until a weak reference tells of its death; the packing itself is done
at the next save or at the context's end, where an error can be raised. One tensor saved twice is packed once.

What is kept is checked against in-place changes, as autograd does without hooks; what the user's functions are given
by its bytes as well, where it is small.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import unused
from ..errors import AotHooksError, HookContractError, HookTraceError, function_named
from ..hook import KEEP, Hook
from ..identity import READ_EACH_TIME, described, tensor_digest
from ..passes.strides import has_gaps, restride
from ..settings.setting import SCOPE, Setting
from ..torch_private import autograd, dynamo
from ..torch_private import values as torch_values
from .modules import note_call
from .rows import EagerRow

__all__ = ["CompiledCall", "Kept", "is_waiting", "pack_eager", "settle", "unpack_eager"]


class Kept:
    """What autograd holds for one saved tensor: the tensor (detached) or what pack made of it."""

    __slots__ = (
        "__weakref__",
        "again",
        "hook",
        "like",
        "packed",
        "raw",
        "state",
        "storage",
        "version",
        "watch",
    )

    def __init__(self, x: torch.Tensor, hook: Hook, again: tuple[Setting, EagerRow] | None = None) -> None:
        self.raw: torch.Tensor | None = x.detach()
        # as long as this lives no other storage gets the same address, which `_Local.seen` relies on
        self.storage = StorageWeakRef(x.untyped_storage()) if x.layout is torch.strided else None
        self.version = x._version
        self.hook = hook
        self.again = again  # whom to ask for the hook once more when it is packed
        self.packed: Any = None
        self.state = "kept"  # kept | waiting | due | packed | spoiled
        self.watch: Any = None
        self.like = (x.shape, x.dtype, x.device)


class _Local(threading.local):
    def __init__(self) -> None:
        self.waiting: list[weakref.ref[Kept]] = []
        self.seen: dict[Any, weakref.ref[Kept]] = {}
        self.call: CompiledCall | None = None


_local = _Local()


def pack_eager(setting: Setting, x: torch.Tensor) -> Any:
    """Autograd's pack hook. Raises what `HookContractError` and `HookTraceError` say."""
    if torch_values.is_traced_value(x) or torch.compiler.is_compiling():
        unused.traced(setting)
        return x  # a tracer runs the program on stand-ins: nothing is saved
    unused.came_by()
    settle()
    if setting.looks_at_modules:
        note_call()
    outermost = _outermost_frame()
    hook, row = _choose(setting, x, outermost)
    # a policy that looks at names is asked again later: the name of what an operator gives is given after it saved it
    again = (setting, row) if row is not None and row.names is not None else None
    if hook is KEEP and again is None:
        return Kept(x, hook)
    layout = (x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg())
    key = (torch_values.storage_key(x), *layout, x._version, setting.key if again else hook)
    known = _local.seen.get(key)
    if known is not None and (kept := known()) is not None:
        return kept
    kept = Kept(x, hook, again)
    seen = _local.seen  # this thread's: the backward, which lets go of it, may run on another one

    def forget(ref: weakref.ref[Kept]) -> None:
        if seen.get(key) is ref:
            del seen[key]

    seen[key] = weakref.ref(kept, forget)
    call = _local.call
    if call is not None:
        call.saved.append(kept)  # decided when the compiled call returns
        kept.state = "waiting"
    elif outermost is None or (setting.scope or SCOPE) != "donated":
        if again:  # at the next save: until then it may get its name
            kept.state = "due"
            _local.waiting.append(weakref.ref(kept))
        else:
            _pack(kept)
    else:
        _wait(kept, x)
    return kept


def unpack_eager(kept: Any) -> torch.Tensor:
    """Autograd's unpack hook."""
    if not isinstance(kept, Kept):
        return kept  # type: ignore[no-any-return]
    if kept.state == "due":
        _pack(kept)
    if kept.state in ("packed", "spoiled"):
        return _unpack(kept)
    assert kept.raw is not None
    if kept.raw._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kept.raw.dtype} {list(kept.raw.shape)}] is at version {kept.raw._version}; "
            f"expected version {kept.version}"
        )
    return kept.raw


def is_waiting() -> bool:
    """Whether something waits to be packed on this thread."""
    return bool(_local.waiting)


def settle() -> None:
    """Pack what is known by now not to be returned."""
    if not _local.waiting:
        return
    waiting, _local.waiting = _local.waiting, []
    for ref in waiting:
        kept = ref()
        if kept is None:
            continue
        if kept.state == "due":
            _pack(kept)
        elif kept.state == "waiting":
            _local.waiting.append(ref)


def _wait(kept: Kept, x: torch.Tensor) -> None:
    ref = weakref.ref(kept)

    def died(_: Any) -> None:
        k = ref()
        if k is not None and k.state == "waiting":
            # inside the outermost module still: an intermediate. Outside: the user had it in hand, so it was returned
            k.state = "due" if _outermost_frame() is not None else "kept"

    kept.state = "waiting"
    kept.watch = weakref.ref(x, died)
    _local.waiting.append(ref)


def _outermost_frame() -> FrameType | None:
    """The frame of the outermost `nn.Module.__call__` or compiled function on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    boundary = dynamo.eval_frame_file()
    while frame is not None:
        code = frame.f_code
        if code is torch_values.MODULE_CALL or (
            code.co_filename == boundary and code.co_name in ("compile_wrapper", "__call__")
        ):
            found = frame
        frame = frame.f_back
    return found


def _choose(setting: Setting, x: torch.Tensor, outermost: FrameType | None) -> tuple[Hook, EagerRow | None]:
    call = _local.call
    if x.layout is not torch.strided or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return KEEP, None
    scope = setting.scope or SCOPE
    if scope == "donated" and call is not None:
        if torch_values.storage_key(x) in call.given:
            return KEEP, None
    elif scope == "donated":
        root = x if x._base is None else x._base
        if root.grad_fn is None or x.grad_fn is None:
            return KEEP, None
        if outermost is not None and torch_values.storage_key(x) in _given(outermost):
            return KEEP, None
    elif scope == "no_static":
        root = x if x._base is None else x._base
        if isinstance(root, torch.nn.Parameter):
            return KEEP, None
        if outermost is not None and torch_values.storage_key(x) in _buffers(outermost):
            return KEEP, None
    if isinstance(setting.rule, Hook) and setting.rule.declines is None and not setting.rule.lossy:
        return setting.rule, None
    row = EagerRow(x)
    try:
        return _ask(setting, row), row
    finally:
        row.close()


def _ask(setting: Setting, row: EagerRow) -> Hook:
    hook = setting.choose(row)
    return KEEP if hook.why_not(row) else hook


def _given(frame: FrameType) -> set[int]:
    local = frame.f_locals
    tensors = torch_values.pytree.tree_leaves((local.get("args", ()), local.get("kwargs", {})))
    return {torch_values.storage_key(t) for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided}


def _buffers(frame: FrameType) -> set[int]:
    module = frame.f_locals.get("self")
    buffers = module.buffers() if isinstance(module, torch.nn.Module) else ()
    return {torch_values.storage_key(b) for b in buffers if b.layout is torch.strided}


def _at(kept: Kept, part: str) -> str:
    shape, dtype, _ = kept.like
    function = function_named(part, getattr(kept.hook, part))
    return f"hook '{kept.hook.name}' on saved {str(dtype).removeprefix('torch.')}{list(shape)} (eager): {function}"


def _pack(kept: Kept) -> None:
    raw = kept.raw
    assert raw is not None
    if kept.again is not None:
        (setting, row), kept.again = kept.again, None
        row.rename()
        kept.hook = _ask(setting, row)
    if kept.hook is KEEP:
        kept.state = "kept"
        return
    if raw._version != kept.version:
        kept.state = "kept"  # changed in place since: reading it in the backward is the error it is without hooks
        return
    compact = raw
    for d, (size, stride) in enumerate(zip(raw.shape, raw.stride(), strict=True)):
        if stride == 0 and size > 1:
            compact = compact.narrow(d, 0, 1)  # a dimension of stride 0 holds one row
    compact = compact.resolve_conj().resolve_neg()
    before = _digests(kept.hook, [compact])
    packed = _run(kept.hook.pack, compact, kept, "pack")
    if raw._version != kept.version or _digests(kept.hook, [compact]) != before:
        raise HookContractError(
            f"{_at(kept, 'pack')} mutates its input in place; expected a pure function. Use x.clone()"
        )
    if packed is None:
        raise HookContractError(f"{_at(kept, 'pack')} returned None; expected the packed value. Is a `return` missing?")
    kept.packed, kept.raw, kept.state = (packed, compact.shape, compact.stride()), None, "packed"


def _unpack(kept: Kept) -> torch.Tensor:
    if kept.state == "spoiled":
        raise HookContractError(
            f"{_at(kept, 'unpack')} changed what was packed in place, and it is needed again (by another reader, or "
            "by a second backward with retain_graph); expected a pure function. Work on packed.clone(), or use the "
            "out-of-place form of the op"
        )
    shape, dtype, device = kept.like
    packed, compact, stride = kept.packed
    counted: list[torch.Tensor] = []
    anew = _containers_anew(packed, counted)
    versions = [a._version for a in counted]
    before = _digests(kept.hook, counted)
    out = _run(kept.hook.unpack, anew, kept, "unpack")
    if [a._version for a in counted] != versions or _digests(kept.hook, counted) != before:
        kept.state = "spoiled"
    if not isinstance(out, torch.Tensor):
        raise HookContractError(
            f"{_at(kept, 'unpack')} returned {type(out).__name__}; expected a tensor like the saved one"
        )
    if (out.shape, out.dtype, out.device) != (compact, dtype, device):
        raise HookContractError(
            f"{_at(kept, 'unpack')} returned {out.dtype}{list(out.shape)} on {out.device}; expected "
            f"{dtype}{list(compact)} on {device}, like the saved one"
        )
    if out.stride() != stride and not kept.hook.lossy:  # as a graph restores it
        like = torch.empty_strided(compact, stride, dtype=dtype, device="meta")
        out = restride(out, like, stride if has_gaps(like) else None)
    return out.expand(shape) if out.shape != shape else out


def _digests(hook: Hook, tensors: list[torch.Tensor]) -> list[str]:
    """Of small tensors on the CPU: a function of the user's may write to them past autograd's versions (`x.data`)."""
    if not described(hook).own:
        return []
    small = (a for a in tensors if a.device.type == "cpu" and a.layout is torch.strided and a.nbytes <= READ_EACH_TIME)
    return [tensor_digest(a) for a in small]


def _containers_anew(packed: Any, tensors: list[torch.Tensor]) -> Any:
    """`packed` in containers of its own, as in a graph: an unpack may take them apart. What of it counts versions goes
    to `tensors`. Written out because torch's pytree leaves a cycle for the collector at each call."""
    if isinstance(packed, torch.Tensor):
        if not packed.is_inference():
            tensors.append(packed)
        return packed
    if isinstance(packed, tuple | list):
        each = [_containers_anew(a, tensors) for a in packed]
        return each if type(packed) is list else tuple(each) if type(packed) is tuple else packed
    if isinstance(packed, dict):
        named = {k: _containers_anew(a, tensors) for k, a in packed.items()}
        return named if type(packed) is dict else packed
    return packed


def _run(fn: Any, argument: Any, kept: Kept, part: str) -> Any:
    try:
        with torch.no_grad(), torch_values.no_autocast(), autograd.hooks_hidden():
            return fn(argument)
    except AotHooksError:
        raise
    except Exception as e:
        raise HookTraceError(f"{_at(kept, part)} raised {type(e).__name__}: {e}") from e


class CompiledCall:
    """A compiled graph that runs with eager hooks around it: its saved tensors have no `grad_fn` to tell them by, so
    what it was given and what it gives back is told by storage."""

    def __init__(self, args: Any) -> None:
        tensors = [
            a
            for a in torch_values.pytree.tree_leaves(args)
            if isinstance(a, torch.Tensor) and a.layout is torch.strided
        ]
        self.given = {torch_values.storage_key(a) for a in tensors}
        self.saved: list[Kept] = []

    def __enter__(self) -> CompiledCall:
        self.before, _local.call = _local.call, self
        return self

    def __exit__(self, *exc: object) -> None:
        _local.call = self.before

    def returned(self, out: Any) -> None:
        """Pack what was saved and not returned."""
        tensors = [
            a for a in torch_values.pytree.tree_leaves(out) if isinstance(a, torch.Tensor) and a.layout is torch.strided
        ]
        outputs = {torch_values.storage_key(a) for a in tensors}
        for kept in self.saved:
            if kept.raw is not None and torch_values.storage_key(kept.raw) in outputs:
                kept.state = "kept"
            else:
                _pack(kept)
