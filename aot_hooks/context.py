"""What the user says, and where it is in force.

      with saved_tensors_hooks(pack, unpack):       around a compiled call: a pair of GraphModules on torch's own
          loss = compiled(x)                         stack, one pair for one value, so Dynamo's guard on identity is
                                                     a guard on the value. Eager parts call the pair (see eager.py).
      def f(x):                                     inside a compiled function: the key of the setting on the nodes
          with saved_tensors_hooks(pack, unpack):    of the region (`torch.fx.traceback.annotate`), guarded by
              ...                                    value.

Which value a hook or policy is, identity/ tells: its pair remembers what graphs were made of, and is found again on
entering where that still matches. Contexts nest, the innermost wins; they are thread-local because torch's stack is. A
compiled call that finds its hook changed since the context was entered raises, because the pair that is guarded stands
for what it was. Eager parts call it as it is; inside a compiled function guards ask at each call.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from . import unused
from .eager.packing import is_waiting, pack_eager, settle, unpack_eager
from .errors import AotHooksError, HookContractError, OptionError
from .hook import Hook
from .identity import Record, Recording, described
from .identity.memo import Memo
from .settings.setting import Policy, Setting, choose, makes
from .torch_private import autograd, dynamo, dynamo_trace

__all__ = [
    "EagerPack",
    "Pair",
    "ambient",
    "forget",
    "made_of",
    "regions",
    "saved_tensors_hooks",
    "saved_tensors_policy",
]


class Pair:
    """The two GraphModules that stand for one setting on torch's stack.

    Dynamo guards them by identity. A compiled graph holds its pair, so an id is never reused while a guard looks for
    it; otherwise a pair lives as long as somebody uses it, and the last few in any case.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting  # of all equal ones the one that was entered last: its name is shown
        self.record = Record(setting.rule, choose)  # what graphs were made of under it
        said = described(setting.rule)
        self.own = bool(said.hooks or said.functions)  # functions of the user's, which may change
        self.open_count = 0  # contexts that it stands for now; of own functions
        self.pack = _module("AotHooksPack", lambda x: pack_eager(_as_entered(self), x))
        self.unpack = _module("AotHooksUnpack", unpack_eager)
        _pair_of_module[id(self.pack)] = weakref.ref(self)
        weakref.finalize(self, _pair_of_module.pop, id(self.pack), None)
        vars(self.pack)["_aot_hooks_pair"] = self  # whoever holds the module holds the pair


# scope and text of a rule, see `described` -> its pairs; the one that was entered last is the first
_pairs: dict[tuple[str | None, str], list[weakref.ref[Pair]]] = {}
_recent: collections.OrderedDict[int, Pair] = collections.OrderedDict()
_pair_of_module: dict[int, weakref.ref[Pair]] = {}
_lock = threading.Lock()
_REGIONS_KEPT, _PAIRS_KEPT = 4096, 8


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[_Context, Pair | None]] = []  # the contexts that this thread is in, innermost last


_entered = _Entered()


def _module(name: str, call: Callable[[Any], Any]) -> GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = GraphModule(torch.nn.Module(), graph, class_name=name)
    # eager autograd calls the module; the graph is there for torch's tools, which want one they can read
    setattr(type(module), "__call__", dynamo.untraced(lambda _, x: call(x)))  # noqa: B010
    return module


def _pair_of(setting: Setting) -> Pair:
    """The pair that stands for `setting`, entered once more."""
    said = described(setting.rule)
    place = (setting.scope, said.text)
    with _lock:
        pairs = [pair for ref in _pairs.get(place, ()) if (pair := ref()) is not None]
    # the guards of probes are asked without the lock: whoever compiles meanwhile holds Dynamo's
    recorded = (pair for pair in pairs if not pair.own or pair.record.answers)
    found = next((pair for pair in recorded if not pair.own or pair.record.matches(setting.rule)), None)
    with _lock:
        if found is None:  # one that no graph was made under stands for whatever it is entered with
            found = next((pair for pair in pairs if not pair.record.answers and not pair.open_count), None)
        if found is None:
            found = Pair(setting)
        found.open_count += found.own
        _pairs[place] = [weakref.ref(found), *(weakref.ref(pair) for pair in pairs if pair is not found)]
        _recent[id(found)] = found
        _recent.move_to_end(id(found))
        while len(_recent) > _PAIRS_KEPT:
            _recent.popitem(last=False)
        if len(_pairs) > _REGIONS_KEPT:
            for at in [at for at, refs in _pairs.items() if not any(ref() for ref in refs)]:
                del _pairs[at]
    found.setting = setting
    return found


def _as_hook(pack: Any, unpack: Any) -> Hook:
    if isinstance(pack, Hook):
        if unpack is not None and unpack is not pack and not isinstance(unpack, Hook):
            raise OptionError(f"saved_tensors_hooks(hook) takes a Hook alone, got {pack!r} and {unpack!r}")
        if unpack is None or unpack is pack:
            return pack
        eager, lossy = pack.eager or unpack.eager, pack.lossy or unpack.lossy
        name = f"{pack.name}/{unpack.name}"
        said = None if None in (pack.cache_hash, unpack.cache_hash) else f"{pack.cache_hash}/{unpack.cache_hash}"
        return Hook(name, pack.pack, unpack.unpack, lossy=lossy, eager=eager, cache_hash=said, declines=pack.declines)
    for name, fn in (("pack", pack), ("unpack", unpack)):
        if not callable(fn):
            raise OptionError(
                f"saved_tensors_hooks: {name} must be a function, a torch.fx.GraphModule or a Hook, got {fn!r}"
                f"{makes(pack)}"
            )
    name = getattr(pack, "__name__", type(pack).__name__)
    # the functions of a Hook, given one by one, still know which tensors they leave alone and whether they round
    lossy = getattr(pack, "lossy", False) is True
    return Hook(name, pack, unpack, lossy=lossy, declines=getattr(pack, "declines", None))


def _setting_of_hooks(pack: Any, unpack: Any, scope: str | None) -> Setting:
    return Setting(_as_hook(pack, unpack), scope)


def _setting_of_policy(policy: Any, scope: str | None) -> Setting:
    return Setting(policy, scope)


class _Context(contextlib.ContextDecorator):
    """A setting in force in a `with`, entered as often as one likes, one after the other or nested; or a decorator.

    Dynamo traces `__enter__` and `__exit__` where they stand in a compiled function. Where they don't, they run in
    Python: after a graph break Dynamo compiles each function that eager code calls, and there `is_compiling()` is true,
    so a context, as a hook, would take itself for traced.
    """

    one: Any  # the hook or policy, if it is one object
    scope: str | None
    setting: Callable[[], Setting]
    region: Callable[[], contextlib.AbstractContextManager[None]]  # for Dynamo to trace

    def __init__(self) -> None:
        self.open: list[Any] = []  # what was entered in a compiled function, innermost last
        self.said: Setting | None = None  # made when somebody asks

    @dynamo.outermost_runs_in_python
    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            region = self.region()
            self.open.append(region)
            region.__enter__()
            return
        # a hook or policy of the library: in microseconds
        known = _library.get(self.one)
        pair = known[self.scope]() if known is not None and self.scope in known else None
        if pair is None or is_waiting():
            dynamo.in_python(_enter, self)
        else:
            _push(pair.pack, pair.unpack)
            _entered.stack.append((self, pair))
            unused.entered()

    @dynamo.outermost_runs_in_python
    def __exit__(self, *exc: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.open.pop().__exit__(*exc)
            return
        _pop()
        context, pair = _entered.stack.pop()
        if pair is not None and pair.own:
            with _lock:
                pair.open_count -= 1
        _allow()  # as it was on entry, or the pair couldn't have been pushed
        if is_waiting():
            dynamo.in_python(settle)
        if unused.is_suspect(context.setting() if pair is None else pair.setting):
            dynamo.in_python(unused.left, context.setting() if pair is None else pair.setting)


_library: Memo[dict[str | None, weakref.ref[Pair]]] = Memo()  # hooks and policies of the library -> scope -> pair
_push, _pop, _allow = autograd.push, autograd.pop, autograd.allow_hooks


def _enter(context: Any) -> None:
    if is_waiting():
        settle()
    pair = _pair_of_functions(context)
    if pair is None:
        setting = context.setting()
        if setting.eager:
            # plain functions: Dynamo does not guard them and compiled graphs call them as they run
            _push(EagerPack(setting), _unpack_untraced)
            _entered.stack.append((context, None))
            unused.entered()
            return
        pair = _pair_of(setting)
        if context.one is setting.rule and described(setting.rule).frozen:
            (_library.get(setting.rule) or _library.set(setting.rule, {}))[context.scope] = weakref.ref(pair)
        _note_functions(context, pair)
    try:
        _push(pair.pack, pair.unpack)
    except BaseException:
        with _lock:
            pair.open_count -= pair.own
        raise
    _entered.stack.append((context, pair))
    unused.entered()


def _functions_of(context: Any) -> tuple[Any, ...] | None:
    """What stays the same of two plain functions, made anew."""
    pack, unpack = getattr(context, "pack", None), getattr(context, "unpack", None)
    if type(pack) is types.FunctionType is type(unpack) and not pack.__dict__:
        return pack.__code__, unpack.__code__, context.scope
    return None


def _pair_of_functions(context: Any) -> Pair | None:
    """The pair for two plain functions that were entered before, and are what they were then."""
    functions = _functions_of(context)
    if functions is None:
        return None
    _, refs = _pairs_of_functions.get(tuple(map(id, functions)), (None, ()))
    for ref in refs:
        pair = ref()
        if pair is not None and pair.record.is_pair(context.pack, context.unpack):
            with _lock:
                pair.open_count += 1
            return pair
    return None


def _note_functions(context: Any, pair: Pair) -> None:
    functions = _functions_of(context)
    if functions is not None:
        _, pairs = _pairs_of_functions.get(place := tuple(map(id, functions)), (None, ()))
        alive = [ref for ref in pairs if ref() not in (None, pair)]
        _pairs_of_functions[place] = (functions, [weakref.ref(pair), *alive])  # with the code objects: ids stay theirs
        if len(_pairs_of_functions) > _REGIONS_KEPT:
            _pairs_of_functions.popitem(last=False)


# ids of two code objects, and a scope -> these, and the pairs that stand for functions of this code
_pairs_of_functions: collections.OrderedDict[Any, tuple[Any, list[weakref.ref[Pair]]]] = collections.OrderedDict()


class saved_tensors_hooks(_Context):
    """Store the tensors that autograd saves in this context as `pack` says.

    Args:
        pack: `tensor -> pytree`, a function, a `torch.fx.GraphModule`, or a `Hook` (which needs no `unpack`).
        unpack: `pytree -> tensor` of the saved tensor's shape, dtype and device.
        scope: "donated" packs intermediates only, never parameters, buffers, graph inputs or outputs; "no_static" packs
            all but parameters and buffers; "all" everything. None: what `options["scope"]` of the compiled function
            says, "donated" if it says nothing and in eager parts.

    May be entered around a compiled call or inside a compiled function (also with `fullgraph=True`), where it covers
    the tensors that its region saves. Eager parts follow the same hooks and scope. The innermost context wins. One
    object may be entered again, and serves as a decorator.

    Raises:
        OptionError: for what is not callable or an unknown scope; on entry, with nothing left on the stack.
        HookContractError, HookTraceError: while compiling (Dynamo may wrap them) or when an eager part packs; from a
            compiled call if what the hooks hold has changed since the context around it was entered.
    """

    def __init__(self, pack: Any, unpack: Any = None, *, scope: str | None = None) -> None:
        super().__init__()
        self.pack, self.unpack, self.scope = pack, unpack, scope
        self.one = pack if unpack is None else None

    def _recreate_cm(self) -> saved_tensors_hooks:
        # for each call of what it decorates: a Dynamo before 2.15 enters only what was made in the function it traces
        return saved_tensors_hooks(self.pack, self.unpack, scope=self.scope)

    def setting(self) -> Setting:
        if self.said is None:
            self.said = _setting_of_hooks(self.pack, self.unpack, self.scope)
        return self.said

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        pack, unpack, scope = self.pack, self.unpack, self.scope  # noqa: F841  # locals, for `_note_hooks` to find
        dynamo.comptime(_note_hooks)
        with torch.fx.traceback.annotate({"aot_hooks": _noted_key()}):
            yield


class saved_tensors_policy(_Context):
    """Store the tensors that autograd saves in this context as the policy chooses for each; else as
    `saved_tensors_hooks`."""

    def __init__(self, policy: Policy | Hook, *, scope: str | None = None) -> None:
        super().__init__()
        self.policy, self.scope, self.one = policy, scope, policy

    def _recreate_cm(self) -> saved_tensors_policy:
        return saved_tensors_policy(self.policy, scope=self.scope)

    def setting(self) -> Setting:
        if self.said is None:
            self.said = _setting_of_policy(self.policy, self.scope)
        return self.said

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        policy, scope = self.policy, self.scope  # noqa: F841  # locals, for `_note_policy` to find
        dynamo.comptime(_note_policy)
        with torch.fx.traceback.annotate({"aot_hooks": _noted_key()}):
            yield


class EagerPack:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @dynamo.untraced
    def __call__(self, x: torch.Tensor) -> Any:
        return pack_eager(self.setting, x)


_unpack_untraced = dynamo.untraced(unpack_eager)


def ambient() -> tuple[Setting | None, Any]:
    """The innermost setting around the current call, and what must live as long as a graph that was compiled for it.

    Stock `torch.autograd.graph.saved_tensors_hooks` with two GraphModules means the same as ours; with anything else it
    is torch's business, as in any other backend.
    """
    top = autograd.top_hooks()
    if top is None:
        return None, None
    pack, unpack = top
    ref = _pair_of_module.get(id(pack))
    pair = ref() if ref is not None else None
    if pair is not None and pair.pack is pack:
        return _as_entered(pair), pair
    if isinstance(pack, GraphModule) and isinstance(unpack, GraphModule):
        return Setting(Hook("saved_tensors_hooks", pack, unpack), autograd.filtering_mode()), (pack, unpack)
    return None, None


def _as_entered(pair: Pair) -> Setting:
    """The setting of `pair` that this thread entered, whose objects may be others than those of an equal one."""
    if _entered.stack and _entered.stack[-1][1] is pair:
        return _entered.stack[-1][0].setting()
    return pair.setting


def made_of(seen: Recording, setting: Setting, alive: Any) -> tuple[Record, Callable[[], None]]:
    """What a graph was made of under `setting`, which `ambient()` gave with `alive`, or which the options say.

    With it comes what to call before each run of the graph. Both raise `HookContractError` if the setting says
    something else by then.
    """
    record = seen.record(setting.rule, choose)
    pair = alive if isinstance(alive, Pair) else None
    if pair is not None:
        if not pair.record.matches(setting.rule):
            raise _changed(setting, "its context was entered")
        pair.record.add(record)

    def check() -> None:
        now = setting if pair is None else _as_entered(pair)
        if not record.matches(now.rule):
            raise _changed(now, "torch.compile made graphs with it" if alive is None else "its context was entered")

    return record, check


def _changed(setting: Setting, whose: str) -> HookContractError:
    what = f"hook '{setting.rule!r}'" if isinstance(setting.rule, Hook) else f"policy '{_name(setting.rule)}'"
    return HookContractError(
        f"{what} has changed since {whose}: something that it holds, or a global that it reads, is another now. Graphs "
        "are made of what it was then; expected no change in between. Enter a context anew after each change (`with` "
        "inside of the loop), or run the hook as it is with Hook(..., eager=True)"
    )


def _name(policy: Any) -> str:
    return str(getattr(policy, "__name__", type(policy).__name__))


# --- regions: what runs while Dynamo traces a `with` inside a compiled function ---------------------------------------


@dataclass(frozen=True)
class Region:
    """A context inside a compiled function.

    Attributes:
        setting: what it says.
        record: what graphs were made of; empty until one is.
        pending: what the compiled function has changed before it, which is not carried out yet while it is traced.
    """

    setting: Setting
    record: Record
    pending: dynamo_trace.Pending

    def made_of(self, seen: Recording) -> Record:
        """What a graph was made of. Raises `OptionError` if that is about to change."""
        pending = self.pending
        if pending.objects or pending.names or pending.storages:
            for name, value, parts in seen.reached(self.setting.rule):
                if pending.has(value, parts):
                    raise _unknown("hook", f"'{name}' that the compiled function has changed before")
        record = seen.record(self.setting.rule, choose)
        self.record.add(record)
        return record


regions: collections.OrderedDict[str, Region] = collections.OrderedDict()
_noted: list[str] = []
_numbers = itertools.count(1)


def _unknown(name: str, what: str) -> OptionError:
    return OptionError(
        f"the {name} of a context inside a compiled function must be known while compiling, got {what}; make it "
        "outside the function, or of constants and of objects that come from outside"
    )


def _note(context: Any, names: tuple[str, ...], make: Callable[..., Setting]) -> None:
    pending = dynamo_trace.pending_changes(context)
    traced = dynamo_trace.Traced(
        context, names, lambda name, e: dynamo.backend_failure("aot_hooks", _unknown(name, str(e)))
    )
    try:
        if (why := autograd.disabled_because()) is not None:
            raise OptionError(f"hooks are disabled here, by torch.autograd.graph.disable_saved_tensors_hooks: {why}")
        setting = make(*traced.values)
        said = described(setting.rule)
        if said.functions and (pending.objects or pending.names):  # what a policy reads nobody knows
            raise _unknown("policy", "a policy, which may read what the compiled function has changed before")
    except AotHooksError as e:
        raise dynamo.backend_failure("aot_hooks", e) from e
    scope, record = setting.scope, Record(setting.rule, choose)

    def holds(*values: Any) -> bool:
        try:
            now = make(*values)
        except AotHooksError:
            return False
        return now.scope == scope and record.matches(now.rule)

    traced.guard(holds)
    key = setting.key if said.frozen else f"region {next(_numbers)}"
    regions[key] = Region(setting, record, pending)
    regions.move_to_end(key)
    while len(regions) > _REGIONS_KEPT:
        regions.popitem(last=False)
    _noted.append(key)


def _note_hooks(context: Any) -> None:
    _note(context, ("pack", "unpack", "scope"), _setting_of_hooks)


def _note_policy(context: Any) -> None:
    _note(context, ("policy", "scope"), _setting_of_policy)


@dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _noted_key() -> str:
    return _noted.pop()


def forget() -> None:
    """Drop the pairs and regions that are only kept for their next use."""
    _recent.clear()
    regions.clear()
    _noted.clear()
