"""Entering and leaving: `saved_tensors_hooks` and `saved_tensors_policy`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import unused
from ..eager.packing import has_pending, pack_pending, unpack_eager
from ..errors import OptionError, names_arguments
from ..hook import STATED, Hook, Pack
from ..settings.setting import Policy, Setting, uncalled_factory
from ..torch_private import autograd, dynamo
from .pairs import EagerPack, open_contexts, pair_for
from .region import note_region, take_key

_push, _pop, _allow = autograd.push, autograd.pop, autograd.allow_hooks
_unpack_untraced = dynamo.untraced(unpack_eager)


class _Context(contextlib.ContextDecorator):
    """A setting in force in a `with`, or a decorator. It may be entered again, also nested in itself.

    Dynamo traces `__enter__` and `__exit__` in a compiled function. Elsewhere they must run in Python: after a graph
    break Dynamo compiles each function that eager code calls. In these `is_compiling()` is true, and the context would
    take itself for traced.
    """

    pack: Any  # may be a hook or policy, without `unpack`
    unpack: Any
    scope: str | None
    open_regions: list[Any]  # entered in a compiled function, innermost last
    note: Callable[[Any], None]  # notes the region that Dynamo enters, from its compile-time context

    @functools.cached_property
    def setting(self) -> Setting:
        return Setting(self.pack, self.scope)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """The region of a compiled function that Dynamo traces."""
        pack = policy = self.pack  # noqa: F841  # locals, for `note_region` to find
        unpack, scope = self.unpack, self.scope  # noqa: F841
        dynamo.comptime(self.note)
        with torch.fx.traceback.annotate({"aot_hooks": take_key()}):
            yield

    @dynamo.outermost_runs_in_python
    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            region = self.region()
            self.open_regions.append(region)
            region.__enter__()
            return
        dynamo.in_python(_enter, self)

    @dynamo.outermost_runs_in_python
    def __exit__(self, *exc: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.open_regions.pop().__exit__(*exc)
            return
        _pop()
        context, pair, saved_count = open_contexts.stack.pop()
        if pair is not None:
            pair.count_open(-1)
        _allow()  # as on entry, or the push would have failed
        if has_pending():
            dynamo.in_python(pack_pending, True)
        setting = context.setting if pair is None else pair.setting
        if unused.is_suspect(setting):
            dynamo.in_python(unused.context_left, setting, saved_count)


def _enter(context: _Context) -> None:
    """Push the pair that stands for the setting of `context` on torch's stack; for an eager hook two functions."""
    pack_pending()
    pair = pair_for(context)
    if pair is None:
        _push(EagerPack(context.setting), _unpack_untraced)
    else:
        try:
            _push(pair.pack, pair.unpack)
        except BaseException:
            pair.count_open(-1)
            raise
    open_contexts.stack.append((context, pair, unused.saves_of_thread.saved_count))


class saved_tensors_hooks(_Context):
    """Store the tensors that autograd saves in this context by `pack`, and restore them by `unpack`.

    Args:
        pack: `tensor -> pytree`, a function, a `torch.fx.GraphModule`, or a `Hook` (which needs no `unpack`).
        unpack: `pytree -> tensor` of the saved tensor's shape, dtype and device.
        scope: "donated" packs intermediates only, never parameters, buffers, graph inputs or outputs; "no_static" packs
            all but parameters and buffers; "all" everything. None: `options["scope"]` of the compiled function;
            "donated" if that is not set, and in eager parts.

    May be entered around a compiled call or inside a compiled function (also with `fullgraph=True`), where it covers
    the tensors that its region saves. Eager parts follow the same hooks and scope. The innermost context wins. One
    object may be entered again, and serves as a decorator.

    Raises:
        OptionError: for an argument that is not callable or an unknown scope; on entry, with nothing left on the stack.
        HookContractError, HookTraceError: while compiling (Dynamo may wrap them) or when an eager part packs; from a
            compiled call if the values that the hooks read have changed since the context around it was entered.
    """

    @names_arguments
    def __init__(self, pack: Any, unpack: Any = None, *, scope: str | None = None) -> None:
        self.pack, self.unpack, self.scope, self.open_regions = pack, unpack, scope, []

    def _recreate_cm(self) -> saved_tensors_hooks:
        # at each call of a decorated function: Dynamo before 2.15 enters only contexts made in the function it traces
        return saved_tensors_hooks(self.pack, self.unpack, scope=self.scope)

    @functools.cached_property
    def setting(self) -> Setting:
        return _setting_of_hooks(self.pack, self.unpack, self.scope)

    @staticmethod
    def note(context: Any) -> None:
        note_region(context, ("pack", "unpack", "scope"), _setting_of_hooks)


class saved_tensors_policy(_Context):
    """Store the tensors that autograd saves in this context by the hook that the policy chooses for each.

    Else as `saved_tensors_hooks`.
    """

    @names_arguments
    def __init__(self, policy: Policy | Hook, *, scope: str | None = None) -> None:
        self.pack, self.unpack, self.scope, self.open_regions = policy, None, scope, []

    def _recreate_cm(self) -> saved_tensors_policy:
        return saved_tensors_policy(self.pack, scope=self.scope)

    @staticmethod
    def note(context: Any) -> None:
        note_region(context, ("policy", "scope"), Setting)


def _setting_of_hooks(pack: Any, unpack: Any, scope: str | None) -> Setting:
    return Setting(_as_hook(pack, unpack), scope)


def _as_hook(pack: Any, unpack: Any) -> Hook:
    if isinstance(pack, Hook):
        if unpack is None or unpack is pack:
            return pack
        if not isinstance(unpack, Hook):
            raise OptionError(f"saved_tensors_hooks(hook) takes a Hook alone, got {pack!r} and {unpack!r}")
        hashes = pack.cache_hash, unpack.cache_hash
        return Hook(
            f"{pack.name}/{unpack.name}",
            pack.pack,
            unpack.unpack,
            lossy=pack.lossy or unpack.lossy,
            eager=pack.eager or unpack.eager,
            cache_hash=None if None in hashes else "/".join(map(str, hashes)),
            declines=pack.declines,
            error=pack.error if pack == unpack else None,
        )
    for name, fn in (("pack", pack), ("unpack", unpack)):
        if not callable(fn):
            hint = uncalled_factory(pack)
            if unpack is None and callable(pack) and not hint:
                hint = f"; is {pack!r} a policy? Then use aot_hooks.saved_tensors_policy"
            raise OptionError(
                f"saved_tensors_hooks: {name} must be a function, a torch.fx.GraphModule or a Hook, got {fn!r}{hint}"
            )
    name = getattr(pack, "__name__", type(pack).__name__)
    # the two functions of a library hook, passed one by one, still know which tensors they decline and how they round
    lossy = getattr(pack, "lossy", False) is True
    stated: dict[str, Any] = {field: getattr(pack, field) for field in STATED} if isinstance(pack, Pack) else {}
    return Hook(name, pack, unpack, lossy=lossy, declines=getattr(pack, "declines", None), **stated)
