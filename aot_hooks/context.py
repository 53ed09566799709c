"""What the user says, and where it is in force.

      with saved_tensors_hooks(pack, unpack):       around a compiled call: a pair of GraphModules on torch's own
          loss = compiled(x)                         stack, one pair for one content, so Dynamo's guard on identity is
                                                     a guard on content. Eager parts call the pair (see eager.py).
      def f(x):                                     inside a compiled function: the key of the setting on the nodes
          with saved_tensors_hooks(pack, unpack):    of the region (`torch.fx.traceback.annotate`), guarded by
              ...                                    content.

Contexts nest, the innermost wins; they are thread-local because torch's stack is. Around a compiled call a hook is what
it was when the context was entered: a compiled call that finds it changed raises, because the pair that is guarded
stands for what it was. Eager parts call it as it is; inside a compiled function guards read it at each call.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from . import unused
from .autograd import _compat as autograd
from .content import content
from .dynamo import _compat as dynamo
from .dynamo.pending import Pending, changed_before
from .eager import pack_eager, settle, unpack_eager
from .errors import AotHooksError, OptionError
from .hook import Hook
from .policy import Policy, Setting, makes

__all__ = ["EagerPack", "Pair", "ambient", "check", "forget", "regions", "saved_tensors_hooks", "saved_tensors_policy"]


class Pair:
    """The two GraphModules that stand for one setting on torch's stack.

    Dynamo guards them by identity. A compiled graph holds its pair, so an id is never reused while a guard looks for
    it; otherwise a pair lives as long as somebody uses it, and the last few in any case.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting  # of all equal ones the one that was entered last: its name is shown
        self.pack = _module("AotHooksPack", lambda x: pack_eager(_as_entered(self), x))
        self.unpack = _module("AotHooksUnpack", unpack_eager)
        _pair_of_module[id(self.pack)] = weakref.ref(self)
        weakref.finalize(self, _pair_of_module.pop, id(self.pack), None)
        vars(self.pack)["_aot_hooks_pair"] = self  # whoever holds the module holds the pair


_pairs: weakref.WeakValueDictionary[str, Pair] = weakref.WeakValueDictionary()
_recent: collections.OrderedDict[str, Pair] = collections.OrderedDict()
_pair_of_module: dict[int, weakref.ref[Pair]] = {}
regions: collections.OrderedDict[str, Setting] = collections.OrderedDict()
_REGIONS_KEPT, _PAIRS_KEPT = 4096, 8


class _Entered(threading.local):
    def __init__(self) -> None:
        self.settings: list[Setting] = []  # of the contexts that this thread is in, innermost last


_entered = _Entered()


def _module(name: str, call: Callable[[Any], Any]) -> GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = GraphModule(torch.nn.Module(), graph, class_name=name)
    # eager autograd calls the module; the graph is there for torch's tools, which want one they can read
    setattr(type(module), "__call__", dynamo.untraced(lambda _, x: call(x)))  # noqa: B010
    return module


def _intern(setting: Setting) -> Pair:
    pair = _pairs.get(setting.key)
    if pair is None:
        pair = _pairs[setting.key] = Pair(setting)
    pair.setting = setting
    _recent[setting.key] = pair
    _recent.move_to_end(setting.key)
    while len(_recent) > _PAIRS_KEPT:
        _recent.popitem(last=False)
    return pair


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


def _setting_of_hooks(pack: Any, unpack: Any, scope: str) -> Setting:
    return Setting(_as_hook(pack, unpack), scope)


def _setting_of_policy(policy: Any, scope: str) -> Setting:
    return Setting(policy, scope)


class _Context(contextlib.ContextDecorator):
    """A setting in force in a `with`, entered as often as one likes, one after the other or nested; or a decorator.

    Dynamo traces `__enter__` and `__exit__` where they stand in a compiled function. Where they don't, they run in
    Python: after a graph break Dynamo compiles each function that eager code calls, and there `is_compiling()` is true,
    so a context, as a hook, would take itself for traced.
    """

    setting: Callable[[], Setting]
    region: Callable[[], contextlib.AbstractContextManager[None]]  # for Dynamo to trace

    def __init__(self) -> None:
        self.open: list[Any] = []  # what was entered in a compiled function, innermost last

    @dynamo.outermost_runs_in_python
    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            region = self.region()
            self.open.append(region)
            region.__enter__()
        else:
            _enter(self)

    @dynamo.outermost_runs_in_python
    def __exit__(self, *exc: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.open.pop().__exit__(*exc)
        else:
            _exit()


@dynamo.untraced
def _enter(context: Any) -> None:
    settle()
    setting = context.setting()
    pair = _intern(setting)
    if setting.eager:
        # plain functions: Dynamo does not guard them and compiled graphs call them as they run
        autograd.push_hooks(EagerPack(setting), _unpack_untraced)
    else:
        autograd.push_hooks(pair.pack, pair.unpack)
    _entered.settings.append(setting)
    unused.entered()


@dynamo.untraced
def _exit() -> None:
    autograd.pop_hooks()
    setting = _entered.settings.pop()
    autograd.allow_hooks()  # as it was on entry, or the pair couldn't have been pushed
    settle()
    unused.left(setting)


class saved_tensors_hooks(_Context):
    """Store the tensors that autograd saves in this context as `pack` says.

    Args:
        pack: `tensor -> pytree`, a function, a `torch.fx.GraphModule`, or a `Hook` (which needs no `unpack`).
        unpack: `pytree -> tensor` of the saved tensor's shape, dtype and device.
        scope: "donated" packs intermediates only, never parameters, buffers, graph inputs or outputs; "no_static" packs
            all but parameters and buffers; "all" everything.

    May be entered around a compiled call or inside a compiled function (also with `fullgraph=True`), where it covers
    the tensors that its region saves. Eager parts follow the same hooks and scope. The innermost context wins. One
    object may be entered again, and serves as a decorator.

    Raises:
        OptionError: for what is not callable or an unknown scope; on entry, with nothing left on the stack.
        HookContractError, HookTraceError: while compiling (Dynamo may wrap them) or when an eager part packs; from a
            compiled call if what the hooks hold has changed since the context around it was entered.
    """

    def __init__(self, pack: Any, unpack: Any = None, *, scope: str = "donated") -> None:
        super().__init__()
        self.pack, self.unpack, self.scope = pack, unpack, scope

    def _recreate_cm(self) -> saved_tensors_hooks:
        # for each call of what it decorates: a Dynamo before 2.15 enters only what was made in the function it traces
        return saved_tensors_hooks(self.pack, self.unpack, scope=self.scope)

    def setting(self) -> Setting:
        return _setting_of_hooks(self.pack, self.unpack, self.scope)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        pack, unpack, scope = self.pack, self.unpack, self.scope  # noqa: F841  # locals, for `_note_hooks` to find
        dynamo.comptime(_note_hooks)
        with torch.fx.traceback.annotate({"aot_hooks": _noted_key()}):
            yield


class saved_tensors_policy(_Context):
    """Store the tensors that autograd saves in this context as the policy chooses for each; else as
    `saved_tensors_hooks`."""

    def __init__(self, policy: Policy | Hook, *, scope: str = "donated") -> None:
        super().__init__()
        self.policy, self.scope = policy, scope

    def _recreate_cm(self) -> saved_tensors_policy:
        return saved_tensors_policy(self.policy, scope=self.scope)

    def setting(self) -> Setting:
        return _setting_of_policy(self.policy, self.scope)

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
        return Setting(Hook("saved_tensors_hooks", pack, unpack)), (pack, unpack)
    return None, None


def _as_entered(pair: Pair) -> Setting:
    """The setting of `pair` that this thread entered, whose objects may be others than those of an equal one."""
    innermost = _entered.settings[-1] if _entered.settings else pair.setting
    return innermost if innermost.key == pair.setting.key else pair.setting


def check(setting: Setting, alive: Any) -> None:
    """Raises `HookContractError` if `setting`, which `ambient()` gave with `alive`, or the options, has changed."""
    if isinstance(alive, Pair):
        _as_entered(alive).check("its context was entered")
    else:
        setting.check("its context was entered" if alive is not None else "torch.compile made graphs with it")


# --- regions: what runs while Dynamo traces a `with` inside a compiled function ---------------------------------------

_noted: list[str] = []


def _note(context: Any, names: tuple[str, ...], make: Callable[..., Setting]) -> None:
    values = []
    pending = Pending(*dynamo.pending_changes(context))
    for name in names:
        variable = dynamo.local_variable(context, name)
        try:
            values.append(dynamo.constant_with_guards(context, variable, content))
            changed = changed_before(values[-1], pending)
            if changed is not None:
                raise TypeError(f"{changed} that the compiled function has changed before")
        except (TypeError, NotImplementedError) as e:
            error = OptionError(
                f"the {name} of a context inside a compiled function must be known while compiling, got {e}; make it "
                "outside the function, or of constants and of objects that come from outside"
            )
            raise dynamo.backend_failure("aot_hooks", error) from e
    try:
        setting = make(*values)
    except AotHooksError as e:
        raise dynamo.backend_failure("aot_hooks", e) from e
    regions[setting.key] = setting
    regions.move_to_end(setting.key)
    while len(regions) > _REGIONS_KEPT:
        regions.popitem(last=False)
    _noted.append(setting.key)


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
