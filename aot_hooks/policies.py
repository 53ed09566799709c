"""Policies: which saved tensors get which hook.

      first_match(                                     SavedTensor --match--> Hook, or None: no choice
          only_these_names({"logits": KEEP}),
          only_these_ops({torch.ops.aten.gelu.default: float8()}),
          larger_than(1 << 20, float8()),
      )

A policy is a pure function `SavedTensor -> Hook`; any such function is one. The policies of this module are frozen,
hashable, picklable values that print as the call that makes them. A policy may stand in place of a hook: `larger_than(1
<< 20, only_these_ops(...))` combines both conditions. In a mapping the first key that matches decides.

Source: the form is that of `jax.checkpoint_policies`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch

from .errors import OptionError, names_arguments
from .graphs.saved import SavedTensor
from .hook import KEEP, Hook
from .settings.operators import operator_key, same_operator
from .settings.setting import POLICY_KEEPS, Policy, check_rule, choose, looks_at_modules, reason_to_keep, reason_to_pack

__all__ = ["everything", "first_match", "larger_than"]
__all__ += ["only_these_dtypes", "only_these_modules", "only_these_names", "only_these_ops"]
Rule: TypeAlias = Hook | Policy


@names_arguments
def everything(hook: Rule) -> Policy:
    """`hook` for every tensor in scope."""
    return _Policy((_rule("everything", hook),))


@names_arguments
def larger_than(nbytes: int, hook: Rule) -> Policy:
    """`hook` for tensors whose storage has more than `nbytes` bytes.

    A symbolic size counts with its value at compile time. The graph is not specialized for it, and not recompiled when
    a later size is on the other side. A size that depends on values counts as 0.

    Raises:
        OptionError: `nbytes` is not an int of at least 0.
    """
    rules = (_rule("larger_than", hook),)
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:  # type: ignore[redundant-expr]
        raise OptionError(f"larger_than(nbytes, hook): expected bytes as an int of at least 0, got {nbytes!r}")
    return _LargerThan(rules, nbytes)


@names_arguments
def only_these_ops(hooks: Mapping[Any, Rule]) -> Policy:
    """A hook by the operator that made the tensor, looking through views.

    Args:
        hooks: `{operator: hook}`. An operator is `torch.ops.aten.gelu.default`, `torch.ops.aten.gelu` (all overloads)
            or a name ("aten.gelu.default", "aten.gelu", "gelu"); "input" stands for inputs of a graph. The operator is
            the one that the program calls, whatever Inductor decomposes it to. In-place forms count as functional.

    Raises:
        OptionError: no such operator, or a composite one, which never saves a tensor itself (aten.linear).
    """
    return _by_key("only_these_ops", hooks)


@names_arguments
def only_these_modules(hooks: Mapping[str, Rule]) -> Policy:
    """A hook by the module that the tensor was made in.

    Args:
        hooks: `{pattern: hook}`. A pattern is a path as in `named_modules()`, and covers the modules inside it:
            "layers.0.mlp" covers "layers.0.mlp.fc1". `*`, `?` and `[...]` match within one name ("layers.*.mlp"), `**`
            matches any number of names ("**.mlp").
    """
    return _by_key("only_these_modules", hooks)


@names_arguments
def only_these_names(hooks: Mapping[str, Rule]) -> Policy:
    """A hook by the name that `aot_hooks.checkpoint_name(x, name)` set on the tensor, or on the base of the view."""
    return _by_key("only_these_names", hooks)


@names_arguments
def only_these_dtypes(hooks: Mapping[torch.dtype, Rule]) -> Policy:
    """A hook by dtype: `{torch.float32: hook}`."""
    return _by_key("only_these_dtypes", hooks)


def first_match(*policies: Rule) -> Policy:
    """The hook of the first policy that chooses one for the tensor; without one, the tensor stays.

    A policy of this module whose condition holds decides, also for `KEEP`. `KEEP` from a plain function means no
    choice. If the chosen hook declines the tensor (`float8` declines masks), the next policy chooses.
    """
    return _FirstMatch(tuple(_rule("first_match", policy) for policy in policies))


# --- the values behind the functions ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _Policy:
    """The first of its rules for every tensor: the policy of `everything`, and the base of the others."""

    rules: tuple[Rule, ...]

    def rules_for(self, saved: SavedTensor) -> tuple[Rule, ...]:
        """The rules whose condition holds."""
        return self.rules

    def match(self, saved: SavedTensor) -> Hook | None:
        """The hook for `saved`; None if the policy makes no choice."""
        return next((_match(rule, saved) for rule in self.rules_for(saved)), None)

    def __call__(self, saved: SavedTensor) -> Hook:
        return self.match(saved) or KEEP

    def why_kept(self, saved: SavedTensor) -> str:
        """The reason to leave `saved`, for reports."""
        reasons = (reason_to_keep(rule, saved) for rule in self.rules_for(saved))
        return "; ".join(dict.fromkeys(filter(None, reasons))) or POLICY_KEEPS

    def why_packed(self, saved: SavedTensor) -> str:
        """The condition that chose the hook for `saved`, for reports; "" if there was none."""
        rule = next(iter(self.rules_for(saved)), None)
        return "" if rule is None else ", ".join(filter(None, (self.condition(saved), reason_to_pack(rule, saved))))

    def condition(self, saved: SavedTensor) -> str:
        """The policy's own condition, which `saved` meets, in words."""
        return ""

    @property
    def looks_at_modules(self) -> bool:
        """Whether the policy, or a policy in it, may read `SavedTensor.module_path`."""
        return any(looks_at_modules(rule) for rule in self.rules)

    def __repr__(self) -> str:
        return f"everything({_rule_text(self.rules[0])})"


def _match(rule: Rule, saved: SavedTensor) -> Hook | None:
    if isinstance(rule, _Policy):
        return rule.match(saved)
    hook = choose(rule, saved)
    return None if hook is KEEP and not isinstance(rule, Hook) else hook


@dataclass(frozen=True, repr=False)
class _LargerThan(_Policy):
    nbytes: int

    def rules_for(self, saved: SavedTensor) -> tuple[Rule, ...]:
        return self.rules if saved.nbytes > self.nbytes else ()

    def why_kept(self, saved: SavedTensor) -> str:
        return super().why_kept(saved) if saved.nbytes > self.nbytes else f"not {self.condition(saved)}"

    def condition(self, saved: SavedTensor) -> str:
        return f"larger than {self.nbytes} bytes"

    def __repr__(self) -> str:
        return f"larger_than({self.nbytes}, {_rule_text(self.rules[0])})"


@dataclass(frozen=True, repr=False)
class _FirstMatch(_Policy):
    def match(self, saved: SavedTensor) -> Hook | None:
        return self._first(saved)[0]

    def why_packed(self, saved: SavedTensor) -> str:
        policy = self._first(saved)[1]
        return "" if policy is None else reason_to_pack(policy, saved)

    def _first(self, saved: SavedTensor) -> tuple[Hook | None, Rule | None]:
        """The first hook that packs `saved`, and its policy."""
        for policy in self.rules:
            hook = _match(policy, saved)
            if hook is not None and not hook.why_not(saved):
                return hook, policy
        return None, None

    def __repr__(self) -> str:
        return f"first_match({', '.join(map(_rule_text, self.rules))})"


def _covers(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the module `path` or a module around it."""

    def covers(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
        if not pattern:
            return True
        if pattern[0] == "**":
            return covers(pattern[1:], path) or (path != () and covers(pattern, path[1:]))
        return path != () and fnmatchcase(path[0], pattern[0]) and covers(pattern[1:], path[1:])

    return covers(tuple(pattern.split(".")), tuple(filter(None, path.split("."))))


class _Kind(NamedTuple):
    """The keys of one function that makes a `ByKey`."""

    name: str  # in reports
    expected: str  # a key in words, for errors
    is_key: Callable[[Any], bool]
    values: Callable[[SavedTensor], tuple[Any, ...]]  # of a saved tensor, to be compared with the keys
    fits: Callable[[Any, Any], bool] = operator.eq  # key, value


_KINDS = {
    # `operator_key` has checked the key
    "only_these_ops": _Kind("operator", "an operator", lambda key: True, lambda saved: (saved.op,), same_operator),
    "only_these_modules": _Kind(
        "in module",
        "a module's path such as 'layers.*.mlp'",
        lambda key: isinstance(key, str) and "" not in key.split("."),
        lambda saved: (saved.module_path,),
        _covers,
    ),
    "only_these_names": _Kind(
        "named",
        "a name as a string",
        lambda key: isinstance(key, str) and key != "",
        lambda saved: saved.checkpoint_names,
    ),
    "only_these_dtypes": _Kind(
        "dtype",
        "a torch.dtype such as torch.float32",
        lambda key: isinstance(key, torch.dtype),
        lambda saved: (saved.dtype,),
    ),
}


@dataclass(frozen=True, repr=False)
class ByKey(_Policy):
    """The rule of the first key that fits: `rules[i]` for `keys[i]`. `function` is the one that made it."""

    function: str
    keys: tuple[Any, ...]

    @property
    def kind(self) -> _Kind:
        return _KINDS[self.function]

    def fits(self, key: Any, saved: SavedTensor) -> bool:
        return any(self.kind.fits(key, value) for value in self.kind.values(saved))

    def rules_for(self, saved: SavedTensor) -> tuple[Rule, ...]:
        return next(((rule,) for key, rule in zip(self.keys, self.rules, strict=True) if self.fits(key, saved)), ())

    def condition(self, saved: SavedTensor) -> str:
        return f"{self.kind.name} {key_text(next(key for key in self.keys if self.fits(key, saved)))}"

    @property
    def looks_at_modules(self) -> bool:
        return self.function == "only_these_modules" or super().looks_at_modules

    def __repr__(self) -> str:
        entries = (f"{key!r}: {_rule_text(rule)}" for key, rule in zip(self.keys, self.rules, strict=True))
        return f"{self.function}({{{', '.join(entries)}}})"


def key_text(key: Any) -> str:
    """A key, or a value that keys are compared with, in messages."""
    return str(key).removeprefix("torch.")


def keys_in(rule: Rule) -> Iterator[tuple[ByKey, Any]]:
    """Each key of the `ByKey` policies in `rule`, after its policy; also of policies inside of policies."""
    if isinstance(rule, ByKey):
        yield from ((rule, key) for key in rule.keys)
    if isinstance(rule, _Policy):
        for inner in rule.rules:
            yield from keys_in(inner)


def _rule(function: str, value: Any) -> Rule:
    check_rule(value, f"{function}: expected a Hook, or a policy")
    if isinstance(value, type):
        raise OptionError(f"{function}: expected a Hook, or a policy, got the class {value.__name__}; make one of it")
    if getattr(value, "decides_for_graph", False):
        raise OptionError(f"{function}: {value!r} decides for all tensors of a graph at once; it can't be in a policy")
    rule: Rule = value
    return rule


def _by_key(function: str, hooks: Any) -> ByKey:
    kind = _KINDS[function]
    if not isinstance(hooks, Mapping) or not hooks:
        raise OptionError(f"{function}: expected a dict from {kind.expected} to a Hook, got {hooks!r}")
    for key in hooks:
        if not kind.is_key(key):
            raise OptionError(f"{function}: expected {kind.expected}, got {key!r}")
    keys = tuple(hooks)
    if function == "only_these_ops":
        try:
            keys = tuple(operator_key(op) for op in hooks)
        except OptionError as e:
            raise OptionError(f"{function}: {e}") from None
    return ByKey(tuple(_rule(function, hook) for hook in hooks.values()), function, keys)


def _rule_text(rule: Rule) -> str:
    if rule == KEEP:
        return "KEEP"
    return repr(rule) if isinstance(rule, Hook | _Policy) else str(getattr(rule, "__name__", repr(rule)))
