"""Which saved tensor gets which hook.

A policy is a pure function `SavedTensor -> Hook`; a `Setting` is what one context (or the options) said: a hook or a
policy, and a scope. Which value it is, however often it is made, see identity/.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import PACKAGE, OptionError, PolicyError
from ..graphs.saved import SavedTensor
from ..hook import KEEP, Hook
from ..identity import described, note_answer
from ..identity.memo import Memo

__all__ = ["SCOPE", "SCOPES", "Policy", "Setting", "choose", "makes", "out_of_scope"]

Policy = Callable[[SavedTensor], Hook]
SCOPES = ("donated", "no_static", "all")

SCOPE = "donated"  # where nobody says another

_numbers: Memo[int] = Memo()
_last_number = itertools.count(1)


def _number(rule: Any) -> int:
    """The number of a rule, the same as long as it lives; another each time for one without weak references."""
    return _numbers.get(rule) or _numbers.set(rule, next(_last_number))


@dataclass(frozen=True)
class Setting:
    """What the user said in one place.

    Attributes:
        rule: a `Hook` for every tensor in scope, or a policy.
        scope: "donated" (only intermediates: no parameters, buffers, inputs, outputs), "no_static" (all but parameters
            and buffers) or "all"; None: what the options of the compiled function say.
    """

    rule: Hook | Policy
    scope: str | None = None

    def __post_init__(self) -> None:
        if self.scope is not None and self.scope not in SCOPES:
            raise OptionError(f"unknown scope {self.scope!r}; expected one of {', '.join(map(repr, SCOPES))}")
        if isinstance(self.rule, Hook):
            return
        if (said := makes(self.rule)) or not callable(self.rule):
            raise OptionError(f"a policy must be a function of a SavedTensor or a Hook, got {self.rule!r}{said}")

    @functools.cached_property
    def key(self) -> str:
        """A name for it. Equal settings of the library have equal keys in every process; others have one an object."""
        said = described(self.rule)
        if said.frozen:
            return hashlib.sha256(f"{self.scope} {said.text}".encode()).hexdigest()[:32]
        return f"{_number(self.rule)} {self.scope}"

    @functools.cached_property
    def text(self) -> str:
        """What the rule says, without what its functions close over."""
        return described(self.rule).text

    def in_scope(self, scope: str) -> Setting:
        """The setting with `scope` where it says none."""
        return self if self.scope is not None else Setting(self.rule, scope)

    @property
    def eager(self) -> bool:
        return isinstance(self.rule, Hook) and self.rule.eager

    @property
    def looks_at_modules(self) -> bool:
        """Whether the rule may read `SavedTensor.module_path`; a function of the user's may."""
        return not isinstance(self.rule, Hook) and bool(getattr(self.rule, "looks_at_modules", True))

    def choose(self, saved: SavedTensor) -> Hook:
        """The hook for `saved`. Raises `PolicyError` naming the tensor if the policy raises or answers nonsense."""
        hook = choose(self.rule, saved)
        note_answer(self.rule, saved, hook)
        return hook

    def why_kept(self, saved: SavedTensor) -> str:
        """Why the policy leaves `saved`, in words: what its own `why_kept(saved)` says, if it has one."""
        why = getattr(self.rule, "why_kept", None)
        return str(why(saved)) if why is not None else "the policy keeps it"

    def why_packed(self, saved: SavedTensor) -> str:
        """Why the policy chose a hook for `saved`: what its own `why_packed(saved)` says, if it has one."""
        if isinstance(self.rule, Hook):
            return f"scope '{self.scope}'"
        why = getattr(self.rule, "why_packed", None)
        return f"policy {_name(self.rule)}" if why is None else str(why(saved)) or f"scope '{self.scope}'"


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
    at = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(PACKAGE)]
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


def out_of_scope(saved: SavedTensor, scope: str | None) -> str | None:
    """Why `saved` is not packed in `scope`, or None if it may be."""
    scope = scope or SCOPE
    if scope != "all" and saved.is_static:
        return "a parameter or buffer"
    if scope == "donated" and saved.is_input:
        return "an input of the graph"
    if scope == "donated" and saved.is_output:
        return "an output of the graph"
    return None
