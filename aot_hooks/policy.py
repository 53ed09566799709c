"""Which saved tensor gets which hook.

A policy is a pure function `SavedTensor -> Hook`; a `Setting` is what one context (or the options) said: a hook or a
policy, a scope, and the digest of both, by which it is one value however often it is made.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .content import Content, read
from .errors import HookContractError, OptionError, PolicyError
from .hook import KEEP, Hook
from .saved import SavedTensor

__all__ = ["SCOPES", "Policy", "Setting", "choose", "makes", "out_of_scope"]

Policy = Callable[[SavedTensor], Hook]
_PACKAGE = os.path.dirname(__file__) + os.sep
SCOPES = ("donated", "no_static", "all")

# id -> policies whose own calls change what they hold: they append to a list, or count
_noting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_FIRST = 8


def _notes(rule: Any) -> bool:
    return _noting.get(id(rule)) is rule


@dataclass(frozen=True)
class Setting:
    """What the user said in one place.

    Attributes:
        rule: a `Hook` for every tensor in scope, or a policy.
        scope: "donated" (only intermediates: no parameters, buffers, inputs, outputs), "no_static" (all but parameters
            and buffers) or "all".
        key: digest of both; equal settings have equal keys, in every process.
        content: what both were when this was made.
        asked: how often `choose` has been called.
    """

    rule: Hook | Policy
    scope: str = "donated"
    key: str = field(init=False, compare=False)
    content: Content = field(init=False, compare=False, repr=False)
    asked: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise OptionError(f"unknown scope {self.scope!r}; expected one of {', '.join(map(repr, SCOPES))}")
        if (said := makes(self.rule)) or (not callable(self.rule) and not isinstance(self.rule, Hook)):
            raise OptionError(f"a policy must be a function of a SavedTensor or a Hook, got {self.rule!r}{said}")
        object.__setattr__(self, "content", read(self.rule, self.scope))
        object.__setattr__(self, "key", self.content.digest)

    def check(self, whose: str) -> None:
        """Raises `HookContractError` if the rule says something else than when this was made: graphs hold what it said
        then. A policy that notes what it is asked changes by that, and is not held to it."""
        if not _notes(self.rule) and not self._is_still():
            what = f"hook '{self.rule!r}'" if isinstance(self.rule, Hook) else f"policy '{_name(self.rule)}'"
            raise HookContractError(
                f"{what} has changed since {whose}: something that it holds, or a global that it reads, is another "
                "now. Graphs are made of what it was then; expected no change in between. Enter a context anew after "
                "each change (`with` inside of the loop), or run the hook as it is with Hook(..., eager=True)"
            )

    @property
    def eager(self) -> bool:
        return isinstance(self.rule, Hook) and self.rule.eager

    @property
    def looks_at_modules(self) -> bool:
        """Whether the rule may read `SavedTensor.module_path`; a function of the user's may."""
        return not isinstance(self.rule, Hook) and bool(getattr(self.rule, "looks_at_modules", True))

    def choose(self, saved: SavedTensor, *, eager: bool = False) -> Hook:
        """The hook for `saved`. Raises `PolicyError` naming the tensor if the policy raises or answers nonsense.

        Eager code asks for each saved tensor of each step: there what takes long to compare is compared only the first
        times, to find out whether the policy notes what it is asked.
        """
        object.__setattr__(self, "asked", self.asked + 1)
        seldom = eager and self.content.may_change and self.asked > _FIRST
        if isinstance(self.rule, Hook) or seldom or _notes(self.rule) or not self._is_still():
            return choose(self.rule, saved)
        hook = choose(self.rule, saved)
        if not self._is_still():
            with contextlib.suppress(TypeError):  # without weak references it is held to what it said
                _noting[id(self.rule)] = self.rule
        return hook

    def _is_still(self) -> bool:
        return self.content.is_still(self.rule, self.scope)

    def why_kept(self, saved: SavedTensor) -> str:
        """Why the policy leaves `saved`, in words: what its own `why_kept(saved)` says, if it has one."""
        why = getattr(self.rule, "why_kept", None)
        return str(why(saved)) if why is not None else "the policy keeps it"

    def why_packed(self, saved: SavedTensor) -> str:
        """Why the policy chose a hook for `saved`: what its own `why_packed(saved)` says, if it has one."""
        if isinstance(self.rule, Hook):
            return f"scope '{self.scope}'"
        why = getattr(self.rule, "why_packed", None)
        if why is None or _notes(self.rule):  # which would note that it was asked again
            return f"policy {_name(self.rule)}"
        return str(why(saved)) or f"scope '{self.scope}'"


def choose(rule: Hook | Policy, saved: SavedTensor) -> Hook:
    """What `rule` says for `saved`; `KEEP` is always that very object, whatever equals it.

    Raises:
        PolicyError: the policy raised, or answered with something else than a `Hook`.
    """
    if isinstance(rule, Hook):
        return KEEP if rule == KEEP else rule
    try:
        hook = rule(saved)
    except PolicyError:  # of a policy inside this one
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


def _raised_at(e: Exception) -> str:
    """The innermost line of the traceback outside of this package: the policy's own."""
    at = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(_PACKAGE)]
    return f" ({os.path.basename(at[-1].filename)}:{at[-1].lineno})" if at else ""


def makes(rule: Any) -> str:
    """What to say of a function of this package that was given in place of what it makes; "" of anything else."""
    if not isinstance(rule, types.FunctionType):
        return ""
    name = rule.__name__
    # found there by its name: an expression that was evaluated in the package's names is the user's
    module: types.ModuleType | None = sys.modules.get(rule.__module__ or "")
    if module is None or module.__name__.split(".")[0] != __package__ or vars(module).get(name) is not rule:
        return ""
    return f"; {name} is the function that makes one: call it, {name}(...)"


def _name(rule: Policy) -> str:
    return str(getattr(rule, "__name__", type(rule).__name__))


def out_of_scope(saved: SavedTensor, scope: str) -> str | None:
    """Why `saved` is not packed in `scope`, or None if it may be."""
    if scope != "all" and saved.is_static:
        return "a parameter or buffer"
    if scope == "donated" and saved.is_input:
        return "an input of the graph"
    if scope == "donated" and saved.is_output:
        return "an output of the graph"
    return None
