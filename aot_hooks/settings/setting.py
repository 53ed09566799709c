"""Which saved tensor gets which hook: a `Setting` is a hook or a policy with a scope, of a context or the options."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..errors import OptionError, PolicyError, in_a_line, is_library_file
from ..graphs.nodes import REGION, annotation
from ..graphs.saved import SavedTensor
from ..hook import KEEP, Hook
from ..identity.frozen import described, is_package_object
from ..identity.memo import Memo
from ..identity.records import note_choice
from .byte_sizes import likely

Policy = Callable[[SavedTensor], Hook]
SCOPES = ("donated", "no_static", "all")
SCOPE = "donated"  # the default
POLICY_KEEPS = "the policy keeps it"  # the reason of a policy without reasons

_numbers: Memo[int] = Memo()
_last_number = itertools.count(1)


@dataclass(frozen=True)
class Setting:
    """A hook or policy with its scope."""

    rule: Hook | Policy  # a `Hook` for every tensor in scope, or a policy: a pure function `SavedTensor -> Hook`
    # "donated" (only intermediates: no parameters, buffers, inputs, outputs), "no_static" (all but parameters and
    # buffers) or "all". None: the scope in the options of the compiled function.
    scope: str | None = None

    def __post_init__(self) -> None:
        if self.scope is not None and self.scope not in SCOPES:
            raise OptionError(f"unknown scope {self.scope!r}; expected one of {', '.join(map(repr, SCOPES))}")
        check_rule(self.rule, "a policy must be a function of a SavedTensor or a Hook")

    @functools.cached_property
    def key(self) -> str:
        """Equal frozen settings have equal keys in every process; others have a key for each object."""
        description = described(self.rule)
        if description.frozen:
            return hashlib.sha256(f"{self.scope} {description.text}".encode()).hexdigest()[:32]
        # the same as long as the rule lives; a rule without weak references gets a new one each time
        number = _numbers.get(self.rule) or _numbers.set(self.rule, next(_last_number))
        return f"{number} {self.scope}"

    @functools.cached_property
    def text(self) -> str:
        """The description of the rule, without the values that its functions close over."""
        return described(self.rule).text

    @property
    def title(self) -> str:
        """The rule in messages: "hook 'int8()'", "policy 'by_size'", "policy larger_than(1024, int8())"."""
        if isinstance(self.rule, Hook):
            return f"hook '{self.rule!r}'"
        return f"policy {getattr(self.rule, '__name__', self.rule)!r}"

    @property
    def eager(self) -> bool:
        return isinstance(self.rule, Hook) and self.rule.eager

    def in_scope(self, scope: str) -> Setting:
        """The setting, with `scope` if it has none."""
        return self if self.scope is not None else Setting(self.rule, scope)

    def choose(self, saved: SavedTensor) -> Hook:
        """The hook for `saved`, noted for the recording of this compilation. Raises as the function `choose`."""
        hook = choose(self.rule, saved)
        note_choice(self.rule, saved, hook)
        return hook


@dataclass(frozen=True)
class SettingsOfGraph:
    """The settings that are in force in one graph of Dynamo."""

    setting: Setting | None  # of the context around the call, or of the options
    regions: dict[str, Setting]  # of the contexts inside the graph, by key

    @property
    def settings(self) -> list[Setting]:
        return [s for s in (self.setting, *self.regions.values()) if s is not None]

    def allows_recast(self, reader: Node) -> bool:
        """Whether `reader`, of the backward, may read a cast of a parameter that is made again.

        Not where nothing is in force or all is kept, as that is what torch does. Scope "all" asks for each copy.
        """
        key = annotation(reader, REGION)
        setting = self.setting if key is None else self.regions.get(key)
        return setting is not None and setting.rule is not KEEP and setting.scope != "all"


def reason_to_keep(rule: Hook | Policy, saved: SavedTensor) -> str:
    """The reason that `rule` itself gives for leaving `saved` as it is; "" if it gives none."""
    if isinstance(rule, Hook):
        return rule.why_not(saved) or ""
    why = getattr(rule, "why_kept", None)
    reason = str(why(saved)) if why is not None else ""
    return "" if reason == POLICY_KEEPS else reason


def reason_to_pack(rule: Hook | Policy, saved: SavedTensor) -> str:
    """The reason that `rule` gives for the hook it chose for `saved`; a plain function's name, "" for a hook."""
    if isinstance(rule, Hook):
        return ""
    why = getattr(rule, "why_packed", None)
    return f"policy {_name(rule)}" if why is None else str(why(saved))


def choose(rule: Hook | Policy, saved: SavedTensor) -> Hook:
    """The hook that `rule` has for `saved`; a hook that equals `KEEP` becomes that very object.

    Raises:
        PolicyError: the policy raised, or returned something else than a `Hook`.
    """
    if isinstance(rule, Hook):
        return KEEP if rule == KEEP else rule
    try:
        hook = rule(saved)
    except PolicyError:  # from a policy inside this one
        raise
    except Exception as e:
        raise PolicyError(
            f"policy '{_name(rule)}' raised {type(e).__name__}: {e}{_raised_at(e)} on saved {saved.describe()}"
        ) from e
    if not isinstance(hook, Hook):
        raise PolicyError(
            f"policy '{_name(rule)}' answered {hook!r} for saved {saved.describe()}; expected a Hook "
            "(aot_hooks.KEEP to leave it)"
        )
    return KEEP if hook == KEEP else hook


def _name(rule: Any) -> str:
    return str(getattr(rule, "__name__", type(rule).__name__))


def _raised_at(e: Exception) -> str:
    """The innermost line of user code in the traceback."""
    at = [f for f in traceback.extract_tb(e.__traceback__) if not is_library_file(f.filename)]
    return f" ({os.path.basename(at[-1].filename)}:{at[-1].lineno})" if at else ""


def looks_at_modules(rule: Hook | Policy) -> bool:
    """Whether `rule` may read `SavedTensor.module_path`; a user's function may."""
    return not isinstance(rule, Hook) and bool(getattr(rule, "looks_at_modules", True))


def check_rule(rule: Any, expected: str) -> None:
    """Raises `OptionError` unless `rule` is a hook or a policy."""
    hint = uncalled_factory(rule)
    is_size = isinstance(rule, int) and not isinstance(rule, bool)
    if is_size or (isinstance(rule, str) and (rule[:1].isdigit() or rule == "fit")):
        hint = f"; write aot_hooks.budget({likely(rule)!r})"
    elif isinstance(rule, torch.nn.Module):  # it can be called, but not with a saved tensor
        hint = ". It takes aot_hooks.float8() or the like; the model is compiled by torch.compile, and called inside"
    elif isinstance(rule, str | bool):
        hint = "; write aot_hooks.float8() or the like"
    if hint or not (isinstance(rule, Hook) or callable(rule)):
        raise OptionError(f"{expected}, got {in_a_line(rule)}{hint}")


def uncalled_factory(rule: Any) -> str:
    """The way out for a function of this package that was passed without a call (`int8` for `int8()`); else ""."""
    if not isinstance(rule, types.FunctionType) or not is_package_object(rule):
        return ""
    return f"; {rule.__name__} is the function that makes one: call it, {rule.__name__}(...)"


def out_of_scope(saved: SavedTensor, scope: str | None) -> str | None:
    """The reason why `saved` is not packed in `scope`; None if it may be."""
    scope = scope or SCOPE
    if scope != "all" and saved.is_static:
        return "a parameter or buffer"
    if scope == "donated" and (saved.is_input or saved.is_output):
        return f"an {'input' if saved.is_input else 'output'} of the graph"
    return None
