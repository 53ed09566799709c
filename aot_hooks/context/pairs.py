"""Pairs of GraphModules on torch's stack: one pair stands for all equal settings.

setting --pair_for--> Pair --push--> torch's stack --ambient--> the setting, while a graph is compiled
                       |     (a pair of `enable` is not pushed: its graphs get it from `enable` itself)
                       |
                       +-- record: what graphs depend on; `record_for` adds to it and checks it at each call
"""

from __future__ import annotations

import collections
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..eager.packing import pack_eager, unpack_eager
from ..errors import HookContractError
from ..hook import Hook
from ..identity.frozen import described
from ..identity.records import Record, Recording
from ..settings.setting import Setting, choose
from ..torch_private import autograd, dynamo

_MAX_KEYS, _MAX_RECENT = 4096, 8  # settings that are found by identity; pairs that stay alive though nobody uses them
_numbers = itertools.count(1)


class Pair:
    """The two GraphModules that stand for one setting on torch's stack.

    Dynamo guards them by identity. A compiled graph holds its pair, so no id is reused while a guard compares it. Other
    pairs live while somebody uses them; the last few stay in any case.
    """

    def __init__(self, setting: Setting) -> None:
        self.number = next(_numbers)
        self.setting = setting  # the equal one that was entered last; messages show its name
        self.record = Record(setting.rule, choose)  # what graphs depend on
        description = described(setting.rule)
        self.may_change = bool(description.hooks or description.functions)  # by functions of the user's
        self.open_count = 0  # open contexts
        self.pack = _module("AotHooksPack", lambda x: pack_eager(_as_entered(self), x))
        self.unpack = _module("AotHooksUnpack", unpack_eager)
        vars(self.pack)["_aot_hooks_pair"] = self  # the module keeps its pair alive

    @dynamo.outermost_runs_in_python
    def count_open(self, more: int) -> None:
        """Count a context that is opened (1) or closed (-1)."""
        with _lock:
            self.open_count += more


class _OpenContexts(threading.local):
    def __init__(self) -> None:
        # of this thread, innermost last: a context, its pair, and how many tensors eager operators had saved before
        self.stack: list[tuple[Any, Pair | None, int]] = []


open_contexts = _OpenContexts()

# scope and text of a rule, see `described` -> its pairs; the one entered last is the first
_pairs: dict[tuple[str | None, str], list[weakref.ref[Pair]]] = {}
_recent: collections.deque[Pair] = collections.deque(maxlen=_MAX_RECENT)
_lock = threading.RLock()


def forget() -> None:
    """Drop the pairs that are only cached."""
    with _lock:
        _recent.clear()


def _keep_alive(pair: Pair) -> None:
    """Keep `pair` alive until other pairs have been entered: Dynamo guards its modules by their ids."""
    with _lock:  # another thread may forget them
        if pair in _recent:
            _recent.remove(pair)
        _recent.append(pair)


def _module(name: str, call: Callable[[Any], Any]) -> GraphModule:
    """A GraphModule that runs `call` when it is called."""
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = GraphModule(torch.nn.Module(), graph, class_name=name)
    # eager autograd calls the module; torch's tools only need a graph that they can read. In compiled autograd, Dynamo
    # traces `forward`, and would take the graph for what is done
    for name in ("__call__", "forward"):
        setattr(type(module), name, dynamo.untraced(lambda _, x: call(x)))
    return module


def pair_for(context: Any) -> Pair | None:
    """The pair that stands for the setting of a context, with this context counted as open; None for an eager hook."""
    pack, unpack = context.pack, context.unpack
    # two plain functions are known by their code objects, which stay the same when the functions are made anew
    plain = type(pack) is types.FunctionType is type(unpack) and not pack.__dict__
    parts = (pack.__code__, unpack.__code__) if plain else (pack,) if unpack is None else (pack, unpack)
    key = (*map(id, parts), str(context.scope))
    known, refs = _pairs_of_parts.get(key, ((), ()))
    if any(part() is not now for part, now in zip(known, parts, strict=False)):  # other objects have got their ids
        refs = ()
    for ref in refs:
        pair = ref()
        if pair is not None and (not pair.may_change or pair.record.is_pair(pack, unpack)):
            pair.count_open(1)
            _keep_alive(pair)
            return pair
    setting: Setting = context.setting
    if setting.eager:
        return None
    pair = pair_of(setting)
    if plain or described(setting.rule).frozen:
        alive = [ref for ref in refs if ref() not in (None, pair)]
        _pairs_of_parts[key] = (tuple(map(weakref.ref, parts)), [weakref.ref(pair), *alive])
        if len(_pairs_of_parts) > _MAX_KEYS:
            _pairs_of_parts.popitem(last=False)
    return pair


# ids of a setting's parts and its scope -> these parts, and the pairs of settings with them. The parts are a hook or
# policy of the library, or the code of two functions
_pairs_of_parts: collections.OrderedDict[Any, tuple[tuple[Any, ...], Sequence[weakref.ref[Pair]]]]
_pairs_of_parts = collections.OrderedDict()


def pair_of(setting: Setting) -> Pair:
    """The pair that stands for `setting`, counted as open."""
    key = (setting.scope, described(setting.rule).text)
    with _lock:
        pairs = [pair for ref in _pairs.get(key, ()) if (pair := ref()) is not None]
    # without the lock: probes need Dynamo's, which a thread that compiles meanwhile holds
    unchanged = (p for p in pairs if not p.may_change or (p.record.choices and p.record.matches(setting.rule)))
    found = next(unchanged, None)
    with _lock:
        if found is None:  # a pair that no graph depends on may stand for any value
            found = next((p for p in pairs if not p.record.choices and not p.open_count), None) or Pair(setting)
        found.count_open(1)
        _pairs[key] = [weakref.ref(found), *(weakref.ref(pair) for pair in pairs if pair is not found)]
        _keep_alive(found)
        if len(_pairs) > _MAX_KEYS:
            for dead in [key for key, refs in _pairs.items() if not any(ref() for ref in refs)]:
                del _pairs[dead]
    found.setting = setting
    return found


class EagerPack:
    """The pack function of an eager hook on torch's stack. Dynamo doesn't guard it; compiled graphs call it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @dynamo.untraced
    def __call__(self, x: torch.Tensor) -> Any:
        return pack_eager(self.setting, x)


def ambient() -> tuple[Setting | None, Any]:
    """The innermost setting around the current call, and the object that a graph compiled for it must keep alive.

    Torch's own `saved_tensors_hooks` with two GraphModules counts as ours. With other functions it is left to torch.
    """
    top = autograd.top_hooks()
    if top is None:
        return None, None
    pack, unpack = top
    pair = getattr(pack, "_aot_hooks_pair", None)
    if isinstance(pair, Pair) and pair.pack is pack:  # a copy of the module is no pair of ours
        return _as_entered(pair), pair
    if isinstance(pack, GraphModule) and isinstance(unpack, GraphModule):
        return Setting(Hook("saved_tensors_hooks", pack, unpack), autograd.filtering_mode()), (pack, unpack)
    return None, None


def _as_entered(pair: Pair) -> Setting:
    """The setting of `pair` that this thread entered; its objects may differ from those of an equal one."""
    if open_contexts.stack and open_contexts.stack[-1][1] is pair:
        setting: Setting = open_contexts.stack[-1][0].setting
        return setting
    return pair.setting


def record_for(
    seen: Recording, setting: Setting, alive: Any, enabled: Pair | None
) -> tuple[Record, Callable[[], None]]:
    """The record of a graph under `setting`, and a check to call before each run of the graph.

    `setting` and `alive` are from `ambient()`; `alive` is None if the setting is that of the options. `enabled`: the
    pair of an `enable`, or None. This function and the check raise `HookContractError` if the setting has changed.
    """
    rule = getattr(setting.rule, "asked", setting.rule)  # of what a graph gets of a budget: what the user said
    pair = enabled or (alive if isinstance(alive, Pair) else None)
    if pair is not None and pair.record.is_forgotten:  # torch._dynamo.reset() in an open context
        pair.record = Record(rule, choose)
    record = seen.record(rule, choose)
    since = "torch.compile made graphs with it" if alive is None else "its context was entered"
    anew = "Enter a context anew after each change (`with` inside of the loop), or run the hook as it is with "
    anew += "Hook(..., eager=True)"
    if enabled is not None:
        since, anew = "aot_hooks.enable was called", "Call aot_hooks.enable anew after each change"
    if pair is not None:
        if not pair.record.matches(rule):
            raise _changed(setting, since, anew)
        pair.record.add(record)

    def check() -> None:
        now = setting if pair is None else _as_entered(pair)
        if not record.matches(getattr(now.rule, "asked", now.rule)):
            raise _changed(now, since, anew)

    return record, check


def _changed(setting: Setting, since: str, anew: str) -> HookContractError:
    return HookContractError(
        f"{setting.title} has changed since {since}: something that it holds, or a global that it reads, is another "
        f"now. Graphs are made of what it was then; expected no change in between. {anew}"
    )
