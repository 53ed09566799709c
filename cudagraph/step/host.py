"""The host values that a step may read: a snapshot, compared before each replay.

    roots (model, optimizer, ...) --walk--> containers   dicts, lists, closures, globals: what can change
                                            leaves       path -> value or identity
                                            tensors      whose memory the graph reads

Containers are compared first: dicts by their version, which Python counts, others entry by entry, by identity. If none
differs, nothing that the walk reaches has changed. Otherwise leaves are compared: numbers, strings and the like by type
and value, all else by identity.

The walk follows attributes of objects, containers, closures, and globals that the user's own functions name. In
modules of the user's it follows what these functions name. It does not follow code of torch, of Python and of installed
packages. If such code is a decorator, the function inside is followed.
"""

from __future__ import annotations

import array
import contextlib
import functools
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch

from ..errors import CudaGraphError
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from .users_code import (
    MISSING,
    PLAIN,
    class_access,
    globals_in,
    imports_of,
    is_users,
    is_users_class,
    is_users_module,
    is_users_own,
    names_in,
    slots_of,
    users_modules,
)  # fmt: skip

MOST_VALUES = 100_000
MOST_BYTES = 1 << 20  # of an array of NumPy
# Objects of torch that are followed. Others, such as what Dynamo compiled, change by themselves.
TORCH_OBJECTS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
Scheduler = torch.optim.lr_scheduler.LRScheduler  # counts outside of the step; what it sets is the optimizer's
WRAPPERS = ("__self__", "__func__", "func", "args", "keywords", "fget")  # of methods, partials and properties


class CannotCompare(CudaGraphError):
    """A step reaches host values that can't be compared before each call: too many, or one that raises."""


class HostState:
    """A snapshot of the host values that can be reached from `roots`. It keeps them alive. Raises `CannotCompare`."""

    def __init__(self, roots: Mapping[str, Any], device_type: str, *, follows_schedulers: bool = False) -> None:
        # By path, such as "optimizer.param_groups[0]['lr']": what is compared, and the objects that were found.
        self.leaves: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Scheduler] = {}  # of learning rates; not followed
        self.compiled = False  # whether a function or module was found that Dynamo compiles
        self.numbers: list[torch.Tensor] = []  # tensors on the CPU, if the step is on another device: versions count
        self._device_type, self._follows_schedulers = device_type, follows_schedulers
        self._objects: list[Any] = []  # whose class is compared
        self._functions: list[types.FunctionType] = []  # whose code and defaults are compared
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        # Containers of other kinds: a function that reads their values, one that puts values back, and the values.
        self._views: list[tuple[Callable[[], list[Any]], Callable[[list[Any]], Any], list[Any]]] = []
        self._arrays: list[tuple[Any, _Content]] = []  # of NumPy and the like
        self._ordered: list[OrderedDict[Any, Any]] = []  # `move_to_end` counts no version
        self._owners: dict[int, Any] = {}  # objects whose `__dict__` could be replaced
        self._spaces: dict[int, dict[str, Any]] = {}  # of modules, which may get more names
        self._seen: dict[int, tuple[Any, str]] = {}
        self._waiting: deque[tuple[str, Any]] = deque(
            {**roots, "all modules and optimizers": torch_cuda.global_hooks()}.items()
        )
        # Modules that are attributes: path, module, and the names that are watched there.
        self._modules: dict[int, tuple[str, types.ModuleType, set[str]]] = {}
        while self._waiting or self._found_in_modules():
            path, value = self._waiting.popleft()
            try:
                self._visit(path, value)
            except CannotCompare:
                raise
            except Exception as error:  # code of the user's, such as a property or `__repr__`
                raise CannotCompare(f"reaches {path}, which raises {type(error).__name__}: {error}") from error
            if len(self.leaves) > MOST_VALUES:
                raise CannotCompare(f"reaches more than {MOST_VALUES} host values, such as {path}")
        if owners := [*self._owners.values()]:
            put_back = functools.partial(_call_for_each, _put_dict_back, owners)
            self._views.append((lambda: [*map(_DICT, owners)], put_back, [*map(_DICT, owners)]))
        self._items, self._lengths = [*chain.from_iterable(self._lists)], [*map(len, self._lists)]
        self._classes, self._parts = [*map(type, self._objects)], [*map(FUNCTION_PARTS, self._functions)]
        self._copies = [each.copy() for each in (*self._dicts, *self._lists)]
        self._order = [*chain.from_iterable(self._ordered)]
        self._sizes = [*map(len, self._spaces.values())]
        self._full, self._empty = [d for d in self._dicts if d], [d for d in self._dicts if not d]
        self._hooked = [x for x in self.tensors.values() if x.requires_grad]
        self._hooks = [*map(torch_cuda.gradient_hooks, self._hooked)]
        self.note_versions()

    def objects(self) -> list[Any]:
        """All objects that were found, except for plain values."""
        return [value for value, _ in self._seen.values()]

    def of_schedulers(self) -> HostState:
        """A snapshot of the schedulers that were found: a step that counts in them can't be replayed."""
        return HostState(self.schedulers, self._device_type, follows_schedulers=True)

    def note_versions(self) -> None:
        """Note the versions of dicts and numbers. Call it when all values are those of the snapshot again."""
        self._versions = [*map(torch_cuda.dict_version, self._full)]
        self._number_versions = [x._version for x in self.numbers]

    def unchanged(self) -> bool:
        """Whether every container holds the very objects of the snapshot."""
        return (
            [*map(torch_cuda.dict_version, self._full)] == self._versions
            and not any(self._empty)
            and [*map(len, self._lists)] == self._lengths
            and [*map(len, self._spaces.values())] == self._sizes
            and all(map(is_, chain.from_iterable(self._lists), self._items))
            and all(map(is_, chain.from_iterable(self._ordered), self._order))
            and all(map(is_, map(type, self._objects), self._classes))
            and all(map(is_, chain(*map(FUNCTION_PARTS, self._functions)), chain(*self._parts)))
            and [*map(torch_cuda.gradient_hooks, self._hooked)] == self._hooks
            and all(_same(read(), saved) for read, _, saved in self._views)
            and all(_content(value) == saved for value, saved in self._arrays)
            and [x._version for x in self.numbers] == self._number_versions
        )

    def differences(self, after: HostState) -> dict[str, str]:
        """What differs in `after`, by path, as text: "True became False"."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        pairs = ((path, self.leaves.get(path, MISSING), after.leaves.get(path, MISSING)) for path in paths)
        return {path: f"{self._text(old)} became {after._text(new)}" for path, old, new in pairs if old != new}

    def _text(self, leaf: Any) -> str:
        if leaf is MISSING:
            return "nothing"
        if isinstance(leaf, tuple):
            return str(float.fromhex(leaf[1])) if leaf[0] is float else repr(leaf[1])
        if isinstance(leaf, int):  # the identity of an object
            return f"a {type(self._seen[leaf][0]).__name__} at 0x{leaf:x}"
        return str(getattr(leaf, "__name__", leaf))

    def accept(self, container: dict[Any, Any], key: Any) -> None:
        """Replace the snapshot's value of `container[key]` by the current one."""
        for each, copy in zip(self._dicts, self._copies, strict=False):
            if each is container:
                copy[key] = each[key]
                if _same(each, copy) and _same(each.values(), copy.values()):
                    self._versions[[*map(id, self._full)].index(id(each))] = torch_cuda.dict_version(each)

    def restore(self) -> None:
        """Put back the contents of containers: of all, also if some raise."""
        with contextlib.ExitStack() as stack:
            for each in self._arrays:
                stack.callback(_restore_array, *each)
            for view in self._views:
                stack.callback(_restore_view, *view)
            for container, copy in zip((*self._dicts, *self._lists), self._copies, strict=True):
                stack.callback(_restore_container, container, copy)

    # --- the walk

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN):
            self.leaves[path] = type(value), value.hex() if isinstance(value, float) else value
            own = None if type(value) in PLAIN else getattr(value, "__dict__", None)
            if isinstance(own, dict) and id(value) not in self._seen and is_users_class(type(value)):
                self._seen[id(value)] = value, path
                self._dict(path, ".{}", own)
        elif value is MISSING:
            self.leaves[path] = MISSING
        elif id(value) in self._seen:
            self.leaves[path] = f"what {self._seen[id(value)][1]} is"
        else:
            self._seen[id(value)] = value, path  # alive, so that no other object gets its id
            self.leaves[path] = id(value)
            self._follow(path, value)

    def _follow(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[path] = value
            if value.device.type == "cpu" != self._device_type:
                self.leaves[path] = f"version {value._version} of {id(value)}"
                self.numbers.append(value)
            self._dict(path, ".{}", value.__dict__)
            if value.requires_grad:
                self._later(path, ".{}", ("hooks", "hooks after accumulation"), torch_cuda.gradient_hooks(value))
        elif isinstance(value, (dict, list, deque, set, tuple, frozenset)):
            self.leaves[path] = type(value)  # not its id: an equal dict in its place is no change
            if isinstance(value, dict):
                if len(value) > 1:
                    order = [key if isinstance(key, PLAIN) else n for n, key in enumerate(value)]
                    self.leaves[f"{path}, its order"] = repr(order)
                if isinstance(value, OrderedDict) and len(value) > 1:
                    self._ordered.append(value)
                if isinstance(value, defaultdict):
                    self._view(path, ["default_factory"], lambda: [value.default_factory])
                self._dict(path, "[{!r}]", value)
            else:
                if isinstance(value, (list, deque, set)):
                    self._lists.append(value)
                self._later(path, "[{}]", range(len(value)), value)
            if type(value).__module__ not in ("builtins", "collections") and is_users_class(type(value)):
                self._dict(path, ".{}", getattr(value, "__dict__", {}))
        elif isinstance(value, types.MappingProxyType):
            self.leaves[path] = type(value)
            self._view(path, map(str, range(2 * len(value))), lambda: [*value, *value.values()])
        elif isinstance(value, (bytearray, array.array)) or hasattr(type(value), "__array_interface__"):
            if (size := getattr(value, "nbytes", 0)) > MOST_BYTES:
                raise CannotCompare(f"{path} is an array of {size} bytes, too many to compare; give it as an input")
            self._arrays.append((value, content := _content(value)))
            self.leaves[path] = f"{type(value).__name__} with hash {hash(content)}"
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, (types.MethodType, functools.partial, staticmethod, classmethod, property)):
            self.leaves[path] = type(value)
            names = [name for name in WRAPPERS if hasattr(value, name)]
            self._later(path, ".{}", names, [getattr(value, name) for name in names])
        elif isinstance(value, type):
            if is_users_class(value):
                for cls in (*value.__mro__[1:-1], type(value)):
                    self._waiting.append((f"{cls.__module__}.{cls.__qualname__}", cls))
                own = {name: x for name, x in vars(value).items() if is_users_own(name, x)}
                self._later(path, ", {}", own, own.values())
                self._views.append((*class_access(value), [*vars(value), *vars(value).values()]))
        elif isinstance(value, types.ModuleType):
            if is_users_module(value):
                self._modules[id(value)] = path, value, set()
        elif hasattr(type(value), "host_roots"):  # a whole step within this one
            self._later(path, ".{}", *zip(*value.host_roots().items(), strict=True))
            names = [name for name in vars(value) if name not in value.own_names]
            self._view(path, names, lambda: [x for name, x in vars(value).items() if name not in value.own_names])
        elif isinstance(value, types.BuiltinMethodType):
            if not isinstance(value.__self__, types.ModuleType):
                self._waiting.append((f"{path}.__self__", value.__self__))
        elif isinstance(value, Scheduler) and not self._follows_schedulers:
            self.schedulers[path] = value
        elif isinstance(value, (*TORCH_OBJECTS, Scheduler)) or is_users_class(type(value)):
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers[path] = value
            self.compiled |= compilers.is_compiled_module(value)
            self._objects.append(value)
            for cls in type(value).__mro__[:-1]:
                self._waiting.append((f"{cls.__module__}.{cls.__qualname__}", cls))
                slots = slots_of(cls)
                read = functools.partial(lambda slots: [getattr(value, slot, MISSING) for slot in slots], slots)
                self._view(path, slots, read, functools.partial(_call_for_each, _put_into_slot, repeat(value), slots))
            if isinstance(getattr(value, "__dict__", None), dict):
                if value.__dict__ is value.__dict__:  # a property may make a dict in each call
                    self._owners[id(value)] = value
                self._dict(path, ".{}", value.__dict__)
            if isinstance(value, torch.jit.ScriptModule):  # its tensors are in no dict
                names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
                self._view(path, names, lambda: [*value.parameters(), *value.buffers()])

    def _found_in_modules(self) -> bool:
        """Follow what the functions found so far may read of modules that are attributes. Whether there is more."""
        names = frozenset[str]().union(*(names_in(function.__code__) for function in self._functions))
        for path, module, known in self._modules.values():
            new = names.intersection(vars(module)) - known
            known |= new
            self._in_module(path, module, sorted(new))
        return bool(self._waiting)

    def _later(self, path: str, how: str, names: Iterable[Any], values: Iterable[Any]) -> None:
        self._waiting.extend((path + how.format(name), value) for name, value in zip(names, values, strict=True))

    def _dict(self, path: str, how: str, value: dict[Any, Any]) -> None:
        self._dicts.append(value)
        self._later(path, how, [key if isinstance(key, PLAIN) else n for n, key in enumerate(value)], value.values())
        others = {n: key for n, key in enumerate(value) if not isinstance(key, PLAIN)}
        self._later(path, ".keys[{}]", others, others.values())

    def _view(
        self,
        path: str,
        names: Iterable[str],
        read: Callable[[], list[Any]],
        write: Callable[[list[Any]], Any] = lambda _: None,
        *,
        by_name: bool = False,
    ) -> None:
        """Watch the values that `read` returns, and follow them: modules only where code names what it reads there."""
        saved = read()
        if saved:
            self._views.append((read, write, saved))
            is_module = by_name and types.ModuleType
            self._later(
                path, ", {}", names, [x.__name__ if is_module and isinstance(x, is_module) else x for x in saved]
            )

    def _in_module(self, path: str, module: types.ModuleType, names: Iterable[str]) -> None:
        """Watch and follow those of `names` that `module` has, and notice when it gets more."""
        space = vars(module)
        self._spaces[id(space)] = space
        self._named(path, space, [name for name in names if name in space])

    def _named(self, path: str, space: dict[str, Any], names: Sequence[str]) -> None:
        """Watch and follow `names` in `space`. Those that are not there may come later."""
        write = functools.partial(_call_for_each, functools.partial(_put_into_dict, space), names)
        self._view(path, names, lambda: [space.get(name, MISSING) for name in names], write, by_name=True)

    def _function(self, path: str, function: types.FunctionType) -> None:
        inner, is_compiled = compilers.inside_wrapper(function)
        self.compiled |= is_compiled
        if inner is not None:
            self._waiting.append((path, inner))
            return
        code, space = function.__code__, function.__globals__
        named = zip(code.co_freevars, function.__closure__ or (), strict=True)
        cells = dict(named)
        if not is_users(code.co_filename):  # it may be a decorator around a function of the user's
            inside = {name: _value_in(cell) for name, cell in cells.items()}
            inside["__wrapped__"] = getattr(function, "__wrapped__", None)
            inside = {name: x for name, x in inside.items() if isinstance(x, INSIDE) or is_users_class(type(x))}
            self._later(path, ".{}", inside, inside.values())
            return
        self._functions.append(function)
        self.leaves[path] = id(code)  # not the function's id: it may be made anew in each step
        self._seen[id(code)] = code, path
        write = functools.partial(_call_for_each, _put_into, cells.values())
        self._view(path, cells, lambda: [*map(_value_in, cells.values())], write, by_name=True)
        names = sorted(names_in(code))
        self._named(path, space, sorted(globals_in(code)))
        imported = map(sys.modules.get, imports_of(code, space.get("__package__") or ""))
        known = [*map(space.get, names), *imported, *map(_value_in, cells.values())]
        for module in users_modules(known, names):
            self._in_module(f"{path}, {module.__name__}", module, names)
        self._dict(path, ".{}", function.__dict__)
        names = [name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name, None)]
        self._later(path, ".{}", names, [getattr(function, name) for name in names])


INSIDE = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)  # followed in a decorator
FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


_DICT = operator.attrgetter("__dict__")


def _put_dict_back(owner: Any, saved: dict[str, Any]) -> None:
    if owner.__dict__ is not saved:
        object.__setattr__(owner, "__dict__", saved)


def _value_in(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING


def _put_into(cell: types.CellType, value: Any) -> None:
    if value is not MISSING:
        cell.cell_contents = value
    elif _value_in(cell) is not MISSING:
        del cell.cell_contents


def _put_into_slot(owner: Any, slot: str, value: Any) -> None:
    if value is not MISSING:
        setattr(owner, slot, value)
    elif hasattr(owner, slot):
        delattr(owner, slot)


def _put_into_dict(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def _call_for_each(function: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    for each in zip(*arguments, strict=False):  # `repeat` has no end
        function(*each)


def _same(now: Iterable[Any], saved: Iterable[Any]) -> bool:
    now, saved = [*now], [*saved]
    return len(now) == len(saved) and all(map(is_, now, saved))


def _restore_container(each: Any, saved: Any) -> None:
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


def _restore_array(value: Any, saved: _Content) -> None:
    if _content(value) == saved:
        return
    content, shape, dtype = saved
    if shape is None:
        memoryview(value).cast("B")[:] = content
        return
    numpy = sys.modules["numpy"]
    if value.dtype != dtype:
        value.dtype = dtype
    if value.shape != shape:
        value.shape = shape
    value[...] = numpy.frombuffer(content, dtype).reshape(shape)  # it may be a view with steps


_Content = tuple[bytes, Any, Any]  # bytes, shape, dtype


def _content(value: Any) -> _Content:
    content = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
    return content, getattr(value, "shape", None), getattr(value, "dtype", None)
