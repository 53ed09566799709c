"""What a step depends on besides its inputs: a snapshot of what was declared, compared before each replay.

    roots          the model, loss function and optimizers; or the step's function; and `state=`
      |            modules, optimizers, scalers, samplers: their attributes. Functions: their variables
      v            other objects: their attributes, two objects deep; those of `state=` at any depth
    leaves         path -> plain value, or identity               "optimizer.param_groups[0]['lr']" -> 0.1
    tensors        path -> tensor whose memory the graph reads
    places         path -> where a number is kept, so that a graph can read it on the device; see numbers.py

Containers are compared first: dicts by their version, which Python counts, others entry by entry, by identity; memory
of Python and NumPy by its bytes. If none differs, nothing has changed. Otherwise leaves are compared: plain values by
type and value, all else by identity.

Random numbers of the host, of Python and NumPy, would not be drawn by a replay: `HostRandom` tells whether any were.

A function's variables are what it closes over, the globals that it names, its defaults and attributes. Of the user's
classes and modules of Python plain values are compared. What a called method reads elsewhere is not looked at:
docs/footguns.md lists what is not.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import operator
import pickle
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from ..errors import CudaGraphError
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import is_dtensor, local_part, sharding_options
from .iterators import is_opaque
from .numbers import Place, Traced
from .users_code import globals_in, is_users, is_users_class, is_users_module

OPTIONS_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
PLAIN = (bool, int, float, complex, str, bytes, type(None), *OPTIONS_OF_TORCH)
FLAGS = (bool, type(None))
MISSING = object()
SET_BY_THE_STEP = "what the step stores there"
ALL = "[:]"  # of a list, in paths
MOST_VALUES = 100_000
OBJECTS_DEEP = 2  # a config of a trainer is looked at, not all that its logger holds
ANY_DEPTH = 1_000
MOST_BYTES = 1 << 14  # of an array that is compared; data sets are larger
MOST_ARRAYS = 64  # that are compared, those found first: 1.7 us each in a call, and a data set may have thousands
DYNAMOS = "_dynamo_"  # begin of attributes that Dynamo sets on parameters when it compiles, such as an evaluation
Scheduler = torch.optim.lr_scheduler.LRScheduler  # counts outside of the step; what it sets is the optimizer's
# Objects of torch whose attributes are compared, and which don't count for the depth.
DECLARED = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.utils.data.Sampler)
WRAPPERS = ("__self__", "__func__", "func", "args", "keywords", "__wrapped__")  # of methods and partials


class CannotCompare(CudaGraphError):
    """A step depends on host values that can't be compared before each call: too many, or one that raises."""


Entry = tuple[Any, Any]  # a dict and a key, or a list and all of it as a slice


# Values that lie in no dict and no list, such as the variables of a function. Its parts are a function that reads them
# all, a function that writes them all, and the values of the snapshot.
View = tuple[Callable[[], list[Any]], Callable[[list[Any]], Any], list[Any]]


class HostState:
    """A snapshot of the host values that can be reached from `roots`. It keeps them alive. Raises `CannotCompare`.

    Args:
        roots: what was declared, by the name that messages give it.
        device_type: of the step's device.
        outputs: paths at which the step stores tensors: they are no dependency.
    """

    def __init__(self, roots: Mapping[str, Any], device_type: str, *, outputs: Collection[str] = ()) -> None:
        self.leaves: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.spread: dict[str, torch.Tensor] = {}  # `DTensor`s; their parts of this process are among `tensors`
        self.places: dict[str, Place] = {}
        self.outputs: dict[str, Entry] = {}  # where the step stores tensors
        self.flags: dict[str, Entry] = {}  # where a value of `FLAGS` is kept
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Scheduler] = {}  # of learning rates; not followed
        self.on_cpu: list[torch.Tensor] = []  # tensors on the CPU, if the step is on another device: versions count
        self._device_type, self._outputs = device_type, outputs
        self._objects: list[Any] = []  # whose class is compared
        self._owners: list[Any] = []  # whose `__dict__` could be replaced
        self._dicts: list[dict[Any, Any]] = []
        self._paths: list[str] = []  # of `_dicts`
        self._lists: list[Any] = []
        self._arrays: list[Any] = []  # arrays and buffers of Python and NumPy
        self._views: list[View] = []
        self._ordered_dicts: list[OrderedDict[Any, Any]] = []  # `move_to_end` counts no version
        self._seen: dict[int, tuple[Any, str]] = {}
        self._shallow: set[int] = set()  # objects that were too deep to be followed where they were first found
        all_roots = {**roots, "all modules and optimizers": torch_cuda.global_hooks()}
        self._waiting = deque(
            (path, value, ANY_DEPTH if path == "state" else OBJECTS_DEEP) for path, value in all_roots.items()
        )
        self._walk()
        # Of each kind of container: its state in the snapshot, for `unchanged`. The lists are parallel.
        self._items, self._lengths = [*chain.from_iterable(self._lists)], [*map(len, self._lists)]
        self._classes, self._attribute_dicts = [*map(type, self._objects)], [*map(ATTRIBUTES, self._owners)]
        # by identity, for dicts and lists: `accept` changes the copies of dicts
        self._copy_of = {id(d): _plain_copy(d) for d in self._dicts} | {id(x): x.copy() for x in self._lists}
        self._contents = [*map(_content, self._arrays)]
        self._keys_in_order = [*chain.from_iterable(self._ordered_dicts)]
        self._full_dicts, self._empty_dicts = [d for d in self._dicts if d], [d for d in self._dicts if not d]
        self._differentiable = [x for x in (*self.tensors.values(), *self.spread.values()) if x.requires_grad]
        self._hooks = [*map(torch_cuda.gradient_hooks, self._differentiable)]
        # Of `DTensor`s. A recording guards their parts, and other tensors.
        self._spread = [*self.spread.values()]
        self._parts, self._require = [*map(local_part, self._spread)], [x.requires_grad for x in self._spread]
        self.note_versions()

    def objects(self) -> list[Any]:
        """All objects that were found, except for plain values."""
        return [value for value, _ in self._seen.values()]

    def iterators(self) -> dict[str, Any]:
        """Iterators of Python's own, and generators, by path."""
        return {path: value for value, path in self._seen.values() if is_opaque(value)}

    def note_versions(self) -> None:
        """Note the versions of dicts and of tensors on the CPU. Call it when all values are those of the snapshot."""
        self._dict_versions = [*map(torch_cuda.dict_version, self._full_dicts)]
        self._cpu_versions = [x._version for x in self.on_cpu]

    def unchanged(self) -> bool:
        """Whether every container holds the very objects of the snapshot. Each line compares containers of one kind."""
        return (
            self._are_full_dicts_as_before()
            and not any(self._empty_dicts)
            and [*map(len, self._lists)] == self._lengths
            and all(map(is_, chain.from_iterable(self._lists), self._items))
            and all(map(is_, chain.from_iterable(self._ordered_dicts), self._keys_in_order))
            and all(map(is_, map(type, self._objects), self._classes))
            and all(map(is_, map(ATTRIBUTES, self._owners), self._attribute_dicts))
            and [*map(torch_cuda.gradient_hooks, self._differentiable)] == self._hooks
            and [x.requires_grad for x in self._spread] == self._require
            and all(map(is_, map(local_part, self._spread), self._parts))
            and all(_same(read(), saved) for read, _, saved in self._views)
            and [*map(_content, self._arrays)] == self._contents
            and [x._version for x in self.on_cpu] == self._cpu_versions
        )

    def _are_full_dicts_as_before(self) -> bool:
        """Whether all dicts that had entries have the same ones. One that was changed and changed back has."""
        versions = [*map(torch_cuda.dict_version, self._full_dicts)]
        if versions != self._dict_versions:
            for each, new, old in zip(self._full_dicts, versions, self._dict_versions, strict=True):
                saved = self._copy_of[id(each)]
                if new != old and not (_same(each, saved) and _same(dict.values(each), dict.values(saved))):
                    return False
            self._dict_versions = versions
        return True

    def differences(self, after: HostState) -> dict[str, str]:
        """What differs in `after`, by path, as text: "True became False"."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        pairs = ((path, self.leaves.get(path, MISSING), after.leaves.get(path, MISSING)) for path in paths)
        return {path: self._text(old, after, new) for path, old, new in pairs if old != new}

    def is_left_by(self, after: HostState) -> bool:
        """Whether a dict that was empty has entries now and is not in `after`: an optimizer's old state, say."""
        reached = {*map(id, after._dicts)}
        return any(each and id(each) not in reached for each in self._empty_dicts)

    def _text(self, old: Any, after: HostState, new: Any) -> str:
        """A changed leaf in words: "True became False"."""
        before, now = self._name(old), after._name(new)
        return f"it is another {now.partition(' ')[2]} now" if before == now else f"{before} became {now}"

    def _name(self, leaf: Any) -> str:
        """A leaf in words: a plain value, "a Tensor" for an identity, "nothing" where there is none."""
        if leaf is MISSING:
            return "nothing"
        if isinstance(leaf, tuple):
            return str(float.fromhex(leaf[1])) if leaf[0] is float else repr(leaf[1])
        by_alias = {f"what {path} is": key for key, (_, path) in self._seen.items()} if isinstance(leaf, str) else {}
        leaf = by_alias.get(leaf, leaf)
        if isinstance(leaf, int):  # the identity of an object
            value = self._seen[leaf][0]
            return f"a function {value.co_name}" if isinstance(value, types.CodeType) else f"a {type(value).__name__}"
        return f"a {leaf.__name__}" if isinstance(leaf, type) else str(leaf)

    def accept(self, container: dict[Any, Any], key: Any) -> None:
        """Replace the snapshot's value of `container[key]` by the current one."""
        if (saved := self._copy_of.get(id(container))) is not None:
            saved[key] = container[key]

    def copied(self) -> HostState:
        """The same snapshot, for another recording: each of the two accepts values of its own."""
        other = copy.copy(self)
        other._copy_of = {key: each.copy() for key, each in self._copy_of.items()}
        other._dict_versions = [*self._dict_versions]
        return other

    def with_flags_of(self, before: HostState) -> HostState:
        """The same snapshot, to compare, with the flags of another one: a step may set a flag that it reads first."""
        other = copy.copy(self)
        other.leaves = self.leaves | {path: before.leaves[path] for path in self.flags.keys() & before.flags.keys()}
        return other

    def stored(self) -> dict[str, Entry]:
        """Entries of dicts, and lists, that hold other values than in the snapshot, by path."""
        entries = {
            _entry(path, container, key): (container, key)
            for path, container in zip(self._paths, self._dicts, strict=True)
            for key, value in container.items()
            if self._copy_of[id(container)].get(key, MISSING) is not value
        }
        others = [x for x in self._lists if isinstance(x, list) and not _same(x, self._copy_of[id(x)])]
        return entries | {f"{self._seen[id(each)][1]}{ALL}": (each, slice(None)) for each in others}

    def restore(self) -> None:
        """Put back the contents of containers: of all, also if some raise."""
        with contextlib.ExitStack() as stack:
            for view in self._views:
                stack.callback(_restore_view, *view)
            for container in (*self._dicts, *self._lists):
                stack.callback(_restore_container, container, self._copy_of[id(container)])
            for array, content in zip(self._arrays, self._contents, strict=True):
                stack.callback(_restore_array, array, content)
            for owner, own in zip(self._owners, self._attribute_dicts, strict=True):
                if owner.__dict__ is not own:
                    stack.callback(object.__setattr__, owner, "__dict__", own)

    # --- the walk

    def _walk(self) -> None:
        while self._waiting:
            path, value, depth = self._waiting.popleft()
            try:
                self._visit(path, value, depth)
            except CannotCompare:
                raise
            except Exception as error:  # code of the user's, such as a property or `__repr__`
                raise CannotCompare(f"depends on {path}, which raises {type(error).__name__}: {error}") from error
            if len(self.leaves) > MOST_VALUES:
                raise CannotCompare(f"depends on more than {MOST_VALUES} host values, such as {path}")

    def _visit(self, path: str, value: Any, depth: int) -> None:
        """Add a leaf for `value`, and follow it if it is met for the first time."""
        if isinstance(value, Traced):  # a number of a capture, where the step itself has stored it
            self.leaves[path] = f"a number that the step computes from {value.name}"
        elif isinstance(value, PLAIN):
            self.leaves[path] = type(value), value.hex() if isinstance(value, float) else value
        elif value is MISSING:
            self.leaves[path] = MISSING
        elif id(value) not in self._seen:
            self._seen[id(value)] = value, path  # alive, so that no other object gets its id
            self.leaves[path] = id(value)
            self._follow(path, value, depth)
        else:
            self.leaves[path] = f"what {self._seen[id(value)][1]} is"
            if depth and id(value) in self._shallow:
                self._shallow.discard(id(value))
                self._attributes(path, value, depth - 1)

    def _follow(self, path: str, value: Any, depth: int) -> None:
        """Add a value that was not met before, by its type. `depth`: how many objects deep to look further."""
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
            if type(value) in (torch.Tensor, torch.nn.Parameter):  # `p.lr_scale = 0.1`
                self._dict(path, value.__dict__, depth, has_attributes=True)
        elif isinstance(value, (dict, list, deque, set, tuple, frozenset, types.MappingProxyType)):
            self.leaves[path] = type(value)  # not its id: an equal dict in its place is no change
            self._container(path, value, depth)
        elif isinstance(value, types.FunctionType):
            self._function(path, value, depth)
        elif isinstance(value, (types.MethodType, functools.partial)):
            self.leaves[path] = type(value)
            names = [name for name in WRAPPERS if hasattr(value, name)]
            self._later(path, ".{}", [name.strip("_") for name in names], [getattr(value, n) for n in names], depth)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            if not isinstance(value.__self__, types.ModuleType):
                self._waiting.append((f"{path}.__self__", value.__self__, depth))
        elif hasattr(type(value), "host_roots"):  # a whole step within this one
            roots = value.host_roots()
            self._later(path, ".{}", roots, roots.values(), depth)
        elif isinstance(value, Scheduler):
            self.schedulers[path] = value
        elif isinstance(value, DECLARED):
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers[path] = value
            self._attributes(path, value, OBJECTS_DEEP if depth < ANY_DEPTH - OBJECTS_DEEP else depth)
            if options := sharding_options(value):
                entries = [*options.values()]
                self.flags |= {f"{path}, {name}": (x, n) for name, (x, n) in options.items() if type(x[n]) in FLAGS}
                write = functools.partial(_put_into_entries, entries)
                self._watch_values(path, [*options], lambda: [x[name] for x, name in entries], write, depth=depth)
            if isinstance(value, torch.jit.ScriptModule):  # its tensors are in no dict
                names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
                self._watch_values(path, names, lambda: [*value.parameters(), *value.buffers()], depth=depth)
        elif len(self._arrays) < MOST_ARRAYS and (content := _content(value)) is not None:
            self.leaves[path] = f"contents {hashlib.sha256(content).hexdigest()[:16]}"
            self._arrays.append(value)
        elif isinstance(value, contextvars.ContextVar):
            write = functools.partial(_put_into_variable, value)
            self._watch_values(path, ["get()"], lambda: [_value_of(value.get)], write, depth=depth)
        elif isinstance(value, weakref.ref):
            self._watch_values(path, ["()"], lambda: [value()], depth=depth)
        elif isinstance(value, threading.local):
            self._dict(path, value.__dict__, depth, has_attributes=True)
        elif isinstance(value, type | types.ModuleType):
            if is_users_class(value) if isinstance(value, type) else is_users_module(value):
                names = [n for n, x in vars(value).items() if isinstance(x, PLAIN) and not n.startswith("__")]
                write = functools.partial(_put_into_names, value, names)
                read = functools.partial(vars, value)
                self._watch_values(path, names, lambda: [read().get(n, MISSING) for n in names], write, depth=depth)
        elif not is_users_class(type(value)):
            return
        elif depth:
            self._attributes(path, value, depth - 1)
        else:
            self._shallow.add(id(value))

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        """Add a tensor: its memory, its hooks, and its version if it is on the CPU and the step is not."""
        if is_dtensor(value):
            self.spread[path] = value
            self._waiting.append((f"{path}, its part here", local_part(value), 0))
        else:
            self.tensors[path] = value
        if value.device.type == "cpu" != self._device_type:
            self.leaves[path] = f"version {value._version} of {id(value)}"
            self.on_cpu.append(value)
        if value.requires_grad:
            self._later(path, ".{}", ("hooks", "hooks after accumulation"), torch_cuda.gradient_hooks(value), 0)

    def _container(self, path: str, value: Any, depth: int) -> None:
        """Add a dict, list, set or the like, and have the walk visit what is in it."""
        if isinstance(value, dict):
            if len(value) > 1:
                order = [key if isinstance(key, PLAIN) else n for n, key in enumerate(value)]
                self.leaves[f"{path}, its order"] = repr(order)
            if isinstance(value, OrderedDict) and len(value) > 1:
                self._ordered_dicts.append(value)
            self._dict(path, value, depth)
        elif isinstance(value, types.MappingProxyType):
            self._watch_values(path, [*map(str, value)], lambda: [*value.values()], depth=depth)
        elif (name := f"{path}{ALL}") in self._outputs and isinstance(value, list) and torch_cuda.tensors_among(value):
            self.leaves[name], self.outputs[name] = SET_BY_THE_STEP, (value, slice(None))
        else:
            if name in self._outputs:  # the list is empty, say
                self.outputs[name] = value, slice(None)
            if isinstance(value, (list, deque, set)):
                self._lists.append(value)
            self._later(path, "[{}]", range(len(value)), value, depth)
        # A module has a dozen empty OrderedDicts, and asking for a `__dict__` makes one.
        own = (type(value) is not OrderedDict or len(value)) and is_users_class(type(value))
        if own and isinstance(getattr(value, "__dict__", None), dict):
            self._attributes(path, value, depth)

    def _attributes(self, path: str, value: Any, depth: int) -> None:
        """Add an object: its class and its attributes."""
        self._objects.append(value)
        self.leaves[f"{path}, its class"] = type(value)
        cls: Any = type(value)
        if slots := _slots(cls):
            write = functools.partial(_put_into_slots, value, slots)
            read = [functools.partial(slot.__get__, value) for slot in slots]
            self._watch_values(path, [x.__name__ for x in slots], lambda: [*map(_value_of, read)], write, depth=depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            if value.__dict__ is value.__dict__:  # a property may make a dict in each call
                self._owners.append(value)
            self._dict(path, value.__dict__, depth, has_attributes=True)

    def _dict(self, path: str, value: dict[Any, Any], depth: int, *, has_attributes: bool = False) -> None:
        """Add a dict, and have the walk visit its entries. `has_attributes`: it is the `__dict__` of an object."""
        self._dicts.append(value)
        self._paths.append(f"{path}." if has_attributes else path)
        for key, entry in value.items():
            if has_attributes and isinstance(key, str) and key.startswith(DYNAMOS):
                continue
            name = _entry(self._paths[-1], value, key)
            if not isinstance(key, PLAIN):
                self._waiting.append((f"{path}.keys[{name.rpartition('[')[2]}", key, depth))
            if name in self._outputs:
                self.outputs[name] = value, key
                if torch_cuda.tensors_among(entry):
                    self.leaves[name] = SET_BY_THE_STEP
                    continue
            if type(entry) in FLAGS:
                self.flags[name] = value, key
            elif type(entry) in (int, float):
                self.places[name] = Place(value, key)
            elif type(entry) is tuple and {*map(type, entry)} <= {int, float}:
                self.places.update({f"{name}[{i}]": Place(value, key, i) for i in range(len(entry))})
            self._waiting.append((name, entry, depth))

    def _later(self, path: str, how: str, names: Iterable[Any], values: Iterable[Any], depth: int) -> None:
        """Have the walk visit `values`. Their paths are `path` with their names, written as `how` says: ".{}"."""
        self._waiting.extend((path + how.format(n), value, depth) for n, value in zip(names, values, strict=True))

    def _watch_values(
        self,
        path: str,
        names: Sequence[str],
        read: Callable[[], list[Any]],
        write: Callable[[list[Any]], Any] = lambda _: None,
        *,
        depth: int,
    ) -> None:
        """Add values that lie in no container, such as a function's variables, to the snapshot, and follow them.

        Args:
            names: of the values, for their paths.
            read: returns their values of now.
            write: puts back the values that it gets; nothing does by default.
        """
        if names:
            saved = read()
            self._views.append((read, write, saved))
            self._later(path, ", {}", names, saved, depth)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> None:
        """Add a function: its code, what it closes over, the globals that it names, and its defaults."""
        if (inner := compilers.inside_wrapper(function)) is not None:
            self._waiting.append((path, inner, depth))
            return
        code, space = function.__code__, function.__globals__
        self.leaves[path] = id(code)  # not the function's id: it may be made anew in each step
        self._seen[id(code)] = code, path
        cells = function.__closure__ or ()
        write = functools.partial(_put_into_cells, cells)
        self._watch_values(path, code.co_freevars, lambda: [*map(_value_in, cells)], write, depth=depth)
        if is_users(code.co_filename):
            names = globals_in(code)
            write = functools.partial(_put_into_entries, [(space, name) for name in names])
            self._watch_values(path, names, lambda: [space.get(name, MISSING) for name in names], write, depth=depth)
            self._watch_values(path, ("code", "defaults", "keywords"), lambda: [*FUNCTION_PARTS(function)], depth=depth)
            self._dict(path, function.__dict__, depth, has_attributes=True)
        elif hasattr(function, "__wrapped__"):
            self._waiting.append((f"{path}.__wrapped__", function.__wrapped__, depth))


ATTRIBUTES = operator.attrgetter("__dict__")
FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _entry(path: str, container: dict[Any, Any], key: Any) -> str:
    """The path of an entry of a dict. A path that ends in a dot is that of an object with attributes."""
    if path.endswith("."):
        return f"{path}{key}"
    return f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[{[*map(id, container)].index(id(key))}]"


def _value_in(cell: types.CellType) -> Any:
    """The value of a variable that a function closes over; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING


def _value_of(read: Callable[[], Any]) -> Any:
    """The value of a slot or a context variable; `MISSING` if it has none yet."""
    try:
        return read()
    except (AttributeError, LookupError):
        return MISSING


@functools.cache
def _slots(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """The descriptors of the attributes that `cls` and its bases name in `__slots__`."""
    found = [x for each in cls.__mro__ if "__slots__" in vars(each) for x in vars(each).values()]
    return tuple(x for x in found if isinstance(x, types.MemberDescriptorType))


def _put_into_slots(owner: Any, slots: Sequence[types.MemberDescriptorType], values: Sequence[Any]) -> None:
    """Give attributes in slots these `values`; `MISSING`: none."""
    for slot, value in zip(slots, values, strict=True):
        if value is not MISSING:
            slot.__set__(owner, value)
        elif hasattr(owner, slot.__name__):
            slot.__delete__(owner)


def _put_into_names(owner: Any, names: Sequence[str], values: Sequence[Any]) -> None:
    """Give attributes of a class or a module of Python the `values` that they had, if they have others."""
    for name, value in zip(names, values, strict=True):
        if vars(owner).get(name, MISSING) is not value:  # the members of an enum can't be set
            setattr(owner, name, value)


def _put_into_variable(variable: contextvars.ContextVar[Any], values: Sequence[Any]) -> None:
    """Give a context variable its value; one that has had none keeps what it has."""
    if values[0] is not MISSING:
        variable.set(values[0])


def _content(value: Any) -> bytes | None:
    """The bytes of a small array or buffer of Python or NumPy; None for others, and for addresses of objects."""
    try:
        with memoryview(value) as view:
            return view.tobytes() if view.nbytes <= MOST_BYTES and "O" not in view.format else None
    except (TypeError, ValueError, BufferError):  # no buffer, a closed one, or one of dates
        return None


def _restore_array(array: Any, content: bytes | None) -> None:
    """Write its former bytes to an array, unless it has them, is read-only or has gaps."""
    if _content(array) != content is not None:
        with memoryview(array) as view:
            if not view.readonly and view.c_contiguous and view.nbytes == len(content):
                view.cast("B")[:] = content


def _put_into_cells(cells: Sequence[types.CellType], values: Sequence[Any]) -> None:
    """Give variables that a function closes over these `values`; `MISSING`: none."""
    for cell, value in zip(cells, values, strict=True):
        if value is not MISSING:
            cell.cell_contents = value
        elif _value_in(cell) is not MISSING:
            del cell.cell_contents


def _put_into_entries(entries: Iterable[Entry], values: Sequence[Any]) -> None:
    """Give entries of dicts these `values`; `MISSING`: none."""
    for (container, key), value in zip(entries, values, strict=True):
        container[key] = value
        if value is MISSING:
            del container[key]


def _same(now: Iterable[Any], saved: Iterable[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    now, saved = [*now], [*saved]
    return len(now) == len(saved) and all(map(is_, now, saved))


def is_of(path: str, roots: Iterable[str]) -> bool:
    """Whether `path` is one of `roots`, or leads to something in one: "opt.lr" is of "opt", "opt_b.lr" is not."""
    return any(path.startswith(root) and path[len(root) :][:1] in ("", ".", "[", ",") for root in roots)


def _plain_copy(each: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict, by no code of a user's class: making one of that may need arguments."""
    if isinstance(each, OrderedDict) and type(each) is not OrderedDict:
        return OrderedDict(OrderedDict.items(each))
    return each.copy() if type(each) is OrderedDict else dict.copy(each)


def _restore_container(each: Any, saved: Any) -> None:
    """Give a dict, list, deque or set the contents of its copy `saved`, unless it has these very objects."""
    is_dict, is_set = isinstance(each, dict), isinstance(each, set)
    if is_set:  # a copy may have another order, and putting it back would change what comes first
        is_same = {*map(id, each)} == {*map(id, saved)}
    else:
        is_same = _same(each, saved) and not (is_dict and not _same(dict.values(each), dict.values(saved)))
    if not is_same:
        each.clear()
        each.update(saved) if is_dict or is_set else each.extend(saved)


def _restore_view(read: Callable[[], list[Any]], write: Callable[[list[Any]], Any], saved: list[Any]) -> None:
    if not _same(read(), saved):
        write(saved)


Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _access(value: Any) -> Access | None:
    """Functions that return and set the state of a generator; None if `value` is none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # that one has no state
        return value.getstate, value.setstate
    if (numpy := sys.modules.get("numpy.random")) is None:  # unless it is imported, nothing is of it
        return None
    if isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    value = value.bit_generator if isinstance(value, numpy.Generator) else value
    is_one = isinstance(value, numpy.BitGenerator)
    return ((lambda: value.state), (lambda state: setattr(value, "state", state))) if is_one else None


class HostRandom:
    """The states of all generators on the host that a step may draw from: the global ones, and those of `objects`."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._generators: list[Access] = [(random.getstate, random.setstate)]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._generators.append((numpy.get_state, numpy.set_state))
        self._generators += [access for value in objects if (access := _access(value)) is not None]
        self._states = [read() for read, _ in self._generators]

    def changed(self) -> bool:
        """Whether numbers were drawn since this was made."""
        now = [read() for read, _ in self._generators]
        return any(pickle.dumps(a) != pickle.dumps(b) for a, b in zip(now, self._states, strict=True))

    def restore(self) -> None:
        """Put all generators back to their states."""
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)
