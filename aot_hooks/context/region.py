"""Regions: contexts inside a compiled function. This code runs while Dynamo traces the `with`."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import AotHooksError, OptionError
from ..identity.frozen import described
from ..identity.records import Record, Recording
from ..settings.setting import Setting, choose
from ..torch_private import autograd, dynamo, dynamo_trace

_MAX_REGIONS = 4096  # regions that are remembered: those noted last
# operators whose bodies may have a context: what a checkpoint saves is seen, and a custom function's body saves nothing
_BODIES = {"tag_activation_checkpoint", "wrap_activation_checkpoint", "autograd.Function"}


@dataclass(frozen=True)
class Region:
    setting: Setting
    record: Record  # what graphs depend on; empty before the first graph
    pending: dynamo_trace.PendingMutations  # what the function changes before the region; only running it will do so

    def record_for(self, seen: Recording) -> Record:
        """The record of a graph. Raises `OptionError` if the function has changed before what a hook reads."""
        if self.pending.objects or self.pending.names or self.pending.storages:
            for name, value, parts in seen.reached(self.setting.rule):
                if self.pending.affects(value, parts):
                    raise _unknown("hook", f"'{name}' that the compiled function has changed before")
        record = seen.record(self.setting.rule, choose)
        self.record.add(record)
        return record


regions: collections.OrderedDict[str, Region] = collections.OrderedDict()  # by key
_noted: list[str] = []  # keys of noted regions that are not annotated yet
_numbers = itertools.count(1)


def note_region(context: Any, names: tuple[str, ...], make: Callable[..., Setting]) -> None:
    """Note the region that Dynamo, with its compile-time `context`, is entering, and guard its setting by value.

    `names`: the local variables to pass to `make`, which returns the setting.
    """
    pending = dynamo_trace.pending_changes(context)
    traced = dynamo_trace.Traced(context, names, lambda name, e: _failure(_unknown(name, str(e))))
    try:
        if (why := autograd.disabled_because()) is not None:
            raise OptionError(f"hooks are disabled here, by torch.autograd.graph.disable_saved_tensors_hooks: {why}")
        if other := [name for name in dynamo_trace.bodies(context) if name not in _BODIES]:
            raise OptionError(
                f"a context inside a function that '{other[0]}' calls would not see all that is saved there; "
                f"expected it around the call of '{other[0]}', whose functions it then covers"
            )
        setting = make(*traced.values)
        description = described(setting.rule)
        if description.functions and (pending.objects or pending.names):  # nobody knows what a policy reads
            raise _unknown("policy", "a policy, which may read what the compiled function has changed before")
    except AotHooksError as e:
        raise _failure(e) from e
    scope, record = setting.scope, Record(setting.rule, choose)

    def unchanged(*values: Any) -> bool:
        try:
            now = make(*values)
        except AotHooksError:
            return False
        return now.scope == scope and record.matches(now.rule)

    traced.guard(unchanged)
    key = setting.key if description.frozen else f"region {next(_numbers)}"
    regions[key] = Region(setting, record, pending)
    regions.move_to_end(key)
    while len(regions) > _MAX_REGIONS:
        regions.popitem(last=False)
    _noted.append(key)


@dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def take_key() -> str:
    """The key of the region noted last, for the annotation of its nodes."""
    return _noted.pop()


def forget() -> None:
    regions.clear()
    _noted.clear()


def _failure(e: AotHooksError) -> Exception:
    return dynamo.backend_failure("aot_hooks", e)


def _unknown(name: str, what: str) -> OptionError:
    return OptionError(
        f"the {name} of a context inside a compiled function must be known while compiling, got {what}; make it "
        "outside the function, or of constants and of objects that come from outside"
    )
