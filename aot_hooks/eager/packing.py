"""The same hooks where torch runs eagerly: graph breaks, `force_eager`, code outside compile.

Scope "donated" must mean the same as in a graph:

      saved x:   no grad_fn (leaf, parameter, buffer, mask)              -> stays
                 view of a leaf (weight.t())                             -> stays
                 input of the outermost module or compiled function      -> stays
                 output of it                                            -> stays
                 anything else                                           -> packed

When x is saved, nobody knows yet whether it will be an output. A tensor that dies while the outermost module still runs
is not one. So x is pending until a weak reference reports its death, which costs no memory: the user holds x anyway.
It is packed at the next save or at the end of the context, where an error can be raised. A tensor is packed once if
one operator saves it twice, or if it is saved again before it is packed. A later save packs it again: a write through
`x.data`, or a changed value of the hook, would not be noticed.

A hook that rounds follows the table of reads, as in a graph. It packs a tensor only if the backward of every operator
that saved it may read rounded numbers. These operators are found a little later, see readers.py. The tensor stays
unpacked until then. An operator that only compares numbers gets the outcomes, as bits beside the rounded numbers. A
norm gets the rounded numbers with the mean and variance that the exact ones had, see norms.py.

Saved values are checked for in-place changes, as autograd does without hooks. The user's functions could write past
autograd's versions, so small arguments of theirs are also compared by their bytes.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import unused
from ..contract import check_packed, check_unpacked, function_named, input_mutated
from ..errors import AotHooksError, HookContractError, HookTraceError
from ..graphs.backward_reads import Read
from ..graphs.layout import expanded_dimensions, with_strides
from ..graphs.norms import Statistics
from ..graphs.probabilities import as_probabilities
from ..hook import KEEP, Hook
from ..identity.frozen import described
from ..identity.tensors import READ_EACH_TIME, tensor_digest
from ..library.bitmask import bits_instead
from ..library.lossless import compare_hook
from ..offloading.hook import unrounded
from ..settings.setting import SCOPE, Setting, looks_at_modules
from ..torch_private import autograd, dynamo
from ..torch_private import values as torch_values
from .modules import note_running_modules
from .norms import Groups, statistics_of, with_statistics
from .readers import Reading, Saved, fake_of, find_from, find_from_backward, this_thread
from .rows import EagerRow


class State(enum.Enum):
    STAYS = enum.auto()  # the tensor itself is stored
    UNDECIDED = enum.auto()  # it may turn out to be an output
    READY = enum.auto()  # to be packed at the next chance
    PACKED = enum.auto()
    MUTATED = enum.auto()  # unpack changed the packed value: it serves no second reader


@dataclass(frozen=True)
class _Packed:
    """What a hook made of a tensor, with what is needed to restore the tensor."""

    hook: Hook
    result: Any
    shape: torch.Size  # of what was packed: expanded dimensions have one element
    stride: tuple[int, ...]


class EagerValue:
    """One saved tensor: the tensor (detached), or what a hook made of it. Autograd holds it, or a `Saved` of it."""

    def __init__(
        self, x: torch.Tensor, hook: Hook, row: EagerRow | None = None, late_policy: Setting | None = None
    ) -> None:
        self.tensor: torch.Tensor | None = x.detach()
        # as long as this lives no other storage gets the same address, which `_Local.seen` relies on
        self.storage = StorageWeakRef(x.untyped_storage()) if x.layout is torch.strided else None
        self.version = x._version
        self.hook = hook
        self.row = row
        self.late_policy = late_policy  # a policy that reads names: it chooses for `row` once more before packing
        self.saves: list[weakref.ref[Saved]] = []  # for each operator that saved it, if the hook may round
        self.packed: _Packed | None = None
        self.answers: _Packed | None = None  # for operators that only compare the numbers, beside rounded ones
        self.statistics: dict[Groups, Statistics] = {}  # for norms, beside rounded numbers
        self.state = State.STAYS
        self.may_be_output = True  # unless it was saved outside of modules
        self.waiting = this_thread()
        self.death: Any = None  # the weak reference that reports the death of `x`
        self.operator = autograd.next_sequence_number()  # greater than that of the operator that saves `x`
        self.softmax_dimension = autograd.softmax_dimension(x)
        self.dtype, self.device, self.is_nested = x.dtype, x.device, x.is_nested
        self.shape = torch.Size() if x.is_nested else x.shape  # a nested tensor may have none, nor strides
        self.stride = x.stride() if x.layout is torch.strided and not x.is_nested else ()

    def readings(self) -> list[Reading | None]:
        """How each operator reads it; those that are gone without a backward don't count."""
        return [saved.reading for ref in self.saves if (saved := ref()) is not None]

    def is_read(self) -> bool:
        """Whether all operators that have saved it are known, if its hook rounds."""
        return not self.hook.lossy or None not in self.readings()


class _Local(threading.local):
    def __init__(self) -> None:
        self.pending: list[weakref.ref[EagerValue]] = []
        self.seen: weakref.WeakValueDictionary[Any, EagerValue] = weakref.WeakValueDictionary()
        self.saved_by_compiled: list[EagerValue] | None = None  # in a compiled call: what it has saved so far
        self.compiled_inputs: set[int] = set()  # and the storages of its inputs


_local = _Local()


def pack_eager(setting: Setting, x: torch.Tensor) -> Any:
    """Autograd's pack hook. Raises `HookContractError` and `HookTraceError`."""
    if torch_values.is_traced_value(x) or torch.compiler.is_compiling():
        unused.traced(setting)
        return x  # a tracer runs the program on fake tensors: nothing is saved
    unused.saves_of_thread.saved_count += 1
    find_from(x)
    held = _held_for(setting, x)
    # `x` itself waits: the program may still give it a name, and other operators may read it
    pack_pending(besides=held.value if isinstance(held, Saved) else held)
    return held


def _held_for(setting: Setting, x: torch.Tensor) -> EagerValue | Saved:
    """What autograd holds in place of `x`."""
    if looks_at_modules(setting.rule):
        note_running_modules()
    outermost = _outermost_frame()
    hook, row = _choose(setting, x, outermost)
    # a policy that reads names chooses again before packing: the program names a result after autograd has saved it
    late_policy = setting if row is not None and row.names is not None else None
    if hook is KEEP and late_policy is None:
        return EagerValue(x, hook)
    layout = (x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg())
    which = hook.name, id(hook.pack), id(hook.unpack)  # a user's functions may have a comparison of their own
    key = (torch_values.storage_key(x), *layout, x._version, which if late_policy is None else late_policy.key)
    value = _local.seen.get(key)
    # what is packed serves only the operator that saved it: a write through `x.data` since then has left no trace
    if value is None or (value.packed is not None and value.operator != autograd.next_sequence_number()):
        value = _local.seen[key] = EagerValue(x, hook, row, late_policy)
        _schedule(value, x, may_be_output=outermost is not None and (setting.scope or SCOPE) == "donated")
    if _local.saved_by_compiled is not None or not (hook.lossy or late_policy):
        return value
    saved = Saved(value)
    value.saves.append(weakref.ref(saved))
    return saved


def _schedule(value: EagerValue, x: torch.Tensor, *, may_be_output: bool) -> None:
    """Pack `value`, a new one, or note when that can be done."""
    if _local.saved_by_compiled is not None:
        _local.saved_by_compiled.append(value)  # decided when the compiled call returns
        value.state = State.UNDECIDED
    elif may_be_output or value.hook.lossy:
        _decide_at_death(value, x, may_be_output)
    elif value.late_policy:  # at a later save: until then it may get its name
        value.state = State.READY
        _local.pending.append(weakref.ref(value))
    else:
        _pack(value)


def unpack_eager(held: Any) -> torch.Tensor:
    """Autograd's unpack hook."""
    if (fake := fake_of(held)) is not None:
        return fake
    saved = held if isinstance(held, Saved) else None
    value = held if saved is None else saved.value
    if not isinstance(value, EagerValue):
        return value  # type: ignore[no-any-return]
    runs = find_from_backward(value.waiting)
    if value.state is State.READY or (value.state is State.UNDECIDED and not value.may_be_output):
        _choose_again(value)
        if value.is_read():
            _pack(value)
        elif runs:  # an operator that reads it is not known
            value.state = State.STAYS
    if value.state in (State.PACKED, State.MUTATED):
        reading = saved.reading if saved is not None else None
        if reading is not None and reading.tests and value.answers is not None:
            return _unpack(value, value.answers)
        found = _unpack(value, value.packed)
        groups = reading.groups if reading is not None else None
        return with_statistics(found, groups, value.statistics[groups]) if groups in value.statistics else found
    return _unchanged(value)


def _unchanged(value: EagerValue) -> torch.Tensor:
    """The tensor of `value`. Raises autograd's error if it was changed in place since it was saved."""
    tensor = value.tensor
    assert tensor is not None
    if tensor._version != value.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {value.version}"
        )
    return tensor


def rounded_by(hook: Hook, x: torch.Tensor) -> torch.Tensor:
    """What a reader in the backward gets in place of `x`: packed and unpacked by `hook`."""
    value = EagerValue(x, hook)
    _pack(value)
    return unpack_eager(value)


def has_pending() -> bool:
    """Whether values of this thread wait to be packed."""
    return bool(_local.pending)


def pack_pending(at_end: bool = False, besides: EagerValue | None = None) -> None:
    """Pack the values that are known by now not to be outputs, and whose operators are known.

    Args:
        at_end: a context ends.
        besides: a value that is not packed yet.
    """
    pending, _local.pending = _local.pending, []
    for ref in pending:
        value = ref()
        if value is None:
            continue
        if at_end and not value.may_be_output and value.state is State.UNDECIDED:
            value.state = State.READY
        if value is besides:
            _local.pending.append(ref)
            continue
        if value.state is State.READY:
            _choose_again(value)
        if value.state is State.READY and value.is_read():
            _pack(value)
        elif value.state in (State.READY, State.UNDECIDED):
            _local.pending.append(ref)


def _decide_at_death(value: EagerValue, x: torch.Tensor, may_be_output: bool) -> None:
    """Decide about `value` when the program drops `x`: then no other operator will save it, and no caller gets it.

    Outside of modules nothing is an output, so the end of the context decides, too.
    """
    ref = weakref.ref(value)

    def died(_: Any) -> None:
        value = ref()
        if value is not None and value.state is State.UNDECIDED:
            # while the outermost module runs: an intermediate. After it: the user had it, so it was an output
            runs = not value.may_be_output or _outermost_frame() is not None
            value.state = State.READY if runs else State.STAYS

    value.state, value.may_be_output = State.UNDECIDED, may_be_output
    value.death = weakref.ref(x, died)
    _local.pending.append(ref)


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
    """The hook for `x`, and the row that a policy chose by; no row where nothing asks for one."""
    if x.layout is not torch.strided or x.is_nested or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return KEEP, None
    if _out_of_scope(setting.scope or SCOPE, x, outermost):
        return KEEP, None
    if isinstance(setting.rule, Hook) and setting.rule.declines is None and not setting.rule.lossy:
        return setting.rule, None
    row = EagerRow(x)
    try:
        return _choose_for(setting, row), row
    finally:
        row.close()


def _out_of_scope(scope: str, x: torch.Tensor, outermost: FrameType | None) -> bool:
    """Whether `scope` excludes `x`, saved while the module or compiled function of the frame `outermost` runs."""
    root = x if x._base is None else x._base
    if scope == "donated":
        if _local.saved_by_compiled is not None:
            return torch_values.storage_key(x) in _local.compiled_inputs
        if root.grad_fn is None or x.grad_fn is None:
            return True
        arguments = (outermost.f_locals.get("args", ()), outermost.f_locals.get("kwargs", {})) if outermost else ()
        return torch_values.storage_key(x) in _storages(arguments)
    if scope == "no_static":
        if isinstance(root, torch.nn.Parameter):
            return True
        module = outermost.f_locals.get("self") if outermost else None
        if not isinstance(module, torch.nn.Module):
            return False
        parameters = module.parameters() if x.grad_fn is None else ()  # x may be `weight.detach()`
        return torch_values.storage_key(x) in _storages([*module.buffers(), *parameters])
    return False


def _choose_for(setting: Setting, row: EagerRow) -> Hook:
    """The hook for `row`."""
    return _taken(setting.choose(row), row)


def _choose_again(value: EagerValue) -> None:
    """Have a policy that reads names choose for `value` once more, now that the program has named it."""
    if value.late_policy is not None:
        assert value.row is not None
        setting, value.late_policy = value.late_policy, None
        value.row.update_names()
        value.hook = _choose_for(setting, value.row)


def _taken(hook: Hook | None, row: EagerRow) -> Hook:
    """`hook`, if it takes `row`; if it leaves it, the one that stores it exactly, if there is one."""
    while hook is not None and hook.why_not(row):
        hook = unrounded(hook) or bits_instead(hook, row)
    return KEEP if hook is None else hook


def _taken_by_readers(value: EagerValue) -> tuple[Hook, Hook]:
    """Two hooks for a `value` whose hook rounds, now that its readers are known: for its numbers, and for answers.

    - Readers that compare the numbers with constants only get the answers, in bits. If all do, nothing else is stored.
    - A reader that must have the exact number makes the hook decline, so the numbers stay.
    - The second hook is `KEEP` where there are no answers beside the numbers.
    """
    assert value.row is not None
    readings = [reading for reading in value.readings() if reading is not None]
    tests = tuple(sorted({test for reading in readings for test in reading.tests or ()}))
    answers = compare_hook(tests, value.dtype) if tests else KEEP
    if answers is not KEEP and all(reading.tests is not None for reading in readings):
        return answers, KEEP
    reads = dict.fromkeys(read for reading in readings for read in reading.reads)
    if tests and answers is KEEP:
        reads[Read("decision", "a comparison")] = None
    value.row.note_reads(tuple(reads))
    hook = _taken(value.hook, value.row)
    return hook, answers if hook.lossy else KEEP


def _storages(tree: Any) -> set[int]:
    return {
        torch_values.storage_key(t)
        for t in torch_values.pytree.tree_leaves(tree)
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    }


def _at(value: EagerValue, hook: Hook, part: str) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    function = function_named(part, getattr(hook, part))
    return f"hook '{hook.name}' on saved {dtype}{list(value.shape)} (eager): {function}"


def _pack(value: EagerValue) -> None:
    """Pack the tensor of `value` and drop it, or leave it as it is; the state says which."""
    tensor = value.tensor
    assert tensor is not None
    _choose_again(value)
    answers = KEEP
    if value.hook.lossy and value.saves:
        value.hook, answers = _taken_by_readers(value)
    # changed in place since it was saved: its reader in the backward raises, as without hooks
    if value.hook is KEEP or tensor._version != value.version:
        value.state = State.STAYS
        return
    value.answers = None if answers is KEEP else _packed(value, tensor, answers)
    if value.hook.lossy:
        groups = {reading.groups for reading in value.readings() if reading is not None}
        value.statistics = {each: statistics_of(tensor, each) for each in groups if each is not None}
    value.packed = packed = _packed(value, tensor, value.hook)
    value.state = State.PACKED
    leaves: list[torch.Tensor] = []
    _copy_containers(packed.result, leaves)
    strided = (leaf for leaf in leaves if leaf.layout is torch.strided)
    if torch_values.storage_key(tensor) not in map(torch_values.storage_key, strided):
        value.tensor = None  # else a write to the tensor is one to what was packed


def _packed(value: EagerValue, tensor: torch.Tensor, hook: Hook) -> _Packed:
    """What `hook` makes of `tensor`. Raises if it writes to it, or returns what no pack may return."""
    compact = tensor
    for d in expanded_dimensions(tensor):
        compact = compact.narrow(d, 0, 1)
    compact = compact.resolve_conj().resolve_neg()
    before = _digests(hook, [compact])
    result = _call(value, hook, "pack", compact)
    if tensor._version != value.version or _digests(hook, [compact]) != before:
        raise input_mutated(_at(value, hook, "pack"))
    check_packed(result, lambda: _at(value, hook, "pack"))
    return _Packed(hook, result, compact.shape, compact.stride())


def _unpack(value: EagerValue, packed: _Packed | None) -> torch.Tensor:
    """The tensor that `packed` gives back, in the strides that were packed. Raises if the hook breaks its contract."""
    assert packed is not None
    hook = packed.hook
    if value.state is State.MUTATED:
        raise HookContractError(
            f"{_at(value, hook, 'unpack')} changed what was packed in place, and it is needed again (by another "
            "reader, or by a second backward with retain_graph); expected a pure function. Work on packed.clone(), or "
            "use the out-of-place form of the op"
        )
    if value.tensor is not None:
        _unchanged(value)
    tensors: list[torch.Tensor] = []
    argument = _copy_containers(packed.result, tensors)
    versions = [a._version for a in tensors]
    before = _digests(hook, tensors)
    out = _call(value, hook, "unpack", argument)
    if [a._version for a in tensors] != versions or _digests(hook, tensors) != before:
        value.state = State.MUTATED
    check_unpacked(out, packed.shape, value.dtype, value.device, lambda: _at(value, hook, "unpack"))
    if out.stride() != packed.stride and not hook.lossy:  # kernels may choose by strides, and round differently
        out = with_strides(out, packed.stride)
    if hook.lossy and value.softmax_dimension is not None:
        out = as_probabilities(out, value.softmax_dimension)
    restored: torch.Tensor = out if out.shape == value.shape else out.expand(value.shape)
    return restored


def _digests(hook: Hook, tensors: list[torch.Tensor]) -> list[str]:
    """Digests of small CPU tensors: a user's function may write to them past autograd's versions (`x.data`)."""
    if not described(hook).own:
        return []
    small = (a for a in tensors if a.device.type == "cpu" and a.layout is torch.strided and a.nbytes <= READ_EACH_TIME)
    return [tensor_digest(a) for a in small]


def _copy_containers(packed: Any, tensors: list[torch.Tensor]) -> Any:
    """`packed` with its tuples, lists and dicts copied, because an unpack may change them, as in a graph.

    Appends the tensors that count versions to `tensors`. Written out because torch's pytree leaves a reference cycle
    at each call.
    """
    if isinstance(packed, torch.Tensor):
        if not packed.is_inference():
            tensors.append(packed)
        return packed
    if isinstance(packed, tuple | list):
        each = [_copy_containers(a, tensors) for a in packed]
        return each if type(packed) is list else tuple(each) if type(packed) is tuple else packed
    if isinstance(packed, dict):
        named = {k: _copy_containers(a, tensors) for k, a in packed.items()}
        return named if type(packed) is dict else packed
    return packed


def _call(value: EagerValue, hook: Hook, part: str, argument: Any) -> Any:
    """Call `pack` or `unpack` of `hook`, without autograd and hooks. Its errors become `HookTraceError`."""
    try:
        with torch.no_grad(), torch_values.no_autocast():  # a hook's own operators save nothing
            return autograd.call_without_hooks(getattr(hook, part), (argument,), "aot_hooks: inside a hook")
    except AotHooksError:
        raise
    except Exception as e:
        raise HookTraceError(f"{_at(value, hook, part)} raised {type(e).__name__}: {e}") from e


def call_compiled(compiled: Callable[..., Any], args: Any) -> Any:
    """Call a compiled graph with eager hooks around it.

    Its saved tensors have no `grad_fn` that tells inputs and outputs from intermediates, so storages tell them apart.
    """
    saved: list[EagerValue] = []
    before = _local.saved_by_compiled, _local.compiled_inputs
    _local.saved_by_compiled, _local.compiled_inputs = saved, _storages(args)
    try:
        out = compiled(*args)
    finally:
        _local.saved_by_compiled, _local.compiled_inputs = before
    outputs = _storages(out)
    for value in saved:
        if value.tensor is not None and torch_values.storage_key(value.tensor) in outputs:
            value.state = State.STAYS
        else:
            _pack(value)
    return out
