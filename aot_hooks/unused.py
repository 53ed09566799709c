"""Hooks and policies that do nothing: one warning each, which says why and the way out.

      a graph is compiled under a setting     --compiled--> what was packed, which keys of its policies fitted
      the first backward after that           --judge-->    nothing packed; a key that fitted nothing
      an eager operator saves, a context ends --left-->     no saved tensor came by
      AOTAutograd traces a pair of ours       --traced-->   another backend compiles the function

Nothing here runs in a step whose graphs packed something, but for a flag that eager parts set and a set that the end of
a context looks into.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from .errors import PACKAGE, UnusedWarning
from .hook import KEEP, Hook
from .passes.plan import Decision, Plan
from .policies import _ByKey, _Policy
from .release import at_end_of_backward
from .settings.setting import Setting
from .torch_private import aot

__all__ = ["came_by", "compiled", "entered", "forget", "is_suspect", "judged", "left", "traced"]

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, PACKAGE, weakref.__file__)
_SHOWN = 8


@dataclass
class _Use:
    """What graphs under one setting did.

    Attributes:
        kept: decisions that left a tensor, while none packed one; empty from the first that did.
        packs: a tensor was packed.
        unmatched: keys of policies that no saved tensor has fitted yet.
        rows: how many tensors they were asked about.
    """

    setting: Setting
    unmatched: dict[tuple[_ByKey, Any], None]
    kept: list[Decision] = field(default_factory=list)
    seen: dict[str, dict[str, None]] = field(default_factory=dict)
    packs: bool = False


_uses: dict[str, _Use] = {}  # by the setting's text
_contexts: set[str] = set()  # texts of settings whose contexts need no further look
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


class _Local(threading.local):
    def __init__(self) -> None:
        self.count = 0  # of tensors that eager operators saved
        self.counts: list[int] = []  # when each context began, innermost last


_local = _Local()


def forget() -> None:
    """Forget what graphs did; what was warned of is not warned of again."""
    with _lock:
        _uses.clear()


# --- graphs -----------------------------------------------------------------------------------------------------------


def compiled(settings: Iterable[Setting], plans: Sequence[Plan]) -> list[Setting]:
    """Note a graph that was compiled under `settings`; those of them that have packed nothing, or have a key that has
    fitted nothing, so far."""
    decisions = [d for plan in plans for d in plan.decisions]
    suspects = []
    with _lock:
        for setting in settings:
            use = _uses.get(setting.text)
            if use is None:
                use = _uses[setting.text] = _Use(setting, dict.fromkeys(_keys(setting.rule)))
            _contexts.add(setting.text)
            for d in decisions:
                if setting.key not in d.settings:
                    continue
                if d.hook is not KEEP:
                    use.packs, use.kept = True, []
                elif not use.packs:
                    use.kept.append(d)
                for policy, key in list(use.unmatched):
                    if policy.fits(key, d.saved):
                        del use.unmatched[policy, key]
                    else:
                        use.seen.setdefault(policy.kind, {}).update(dict.fromkeys(policy.values(d.saved)))
            if use.unmatched or (use.kept and not _is_keep(setting)):
                suspects.append(setting)
    return suspects


def _keys(rule: Any) -> Iterator[tuple[_ByKey, Any]]:
    if isinstance(rule, _ByKey):
        yield from ((rule, key) for key, _ in rule.entries)
    if isinstance(rule, _Policy):
        for inner in rule.rules:
            yield from _keys(inner)


def judged(run: Callable[..., Any], suspects: list[Setting]) -> Callable[..., Any]:
    """`run`, a compiled graph; when the first backward after it has run, what is still unused is warned of. By then
    the other graphs of the forward are compiled too."""
    if not suspects:
        return run
    waiting = [suspects]

    def run_and_judge(*args: Any) -> Any:
        outputs = run(*args)
        if waiting and at_end_of_backward(outputs, lambda: _judge(suspects)):
            waiting.clear()
        return outputs

    return run_and_judge


def _judge(suspects: list[Setting]) -> None:
    for setting in suspects:
        use = _uses.get(setting.text)
        if use is None:
            continue
        if use.kept and not use.unmatched and not _is_keep(setting):
            _warn(setting, "packed", _packed_nothing(use))
        for policy, key in use.unmatched:
            _warn(setting, f"{policy.kind} {key}", _fitted_nothing(policy, key, use.seen.get(policy.kind, {})))


def _packed_nothing(use: _Use) -> str:
    reasons = collections.Counter(d.reason for d in use.kept).most_common(3)
    why = "; ".join(f"{count} {reason}" for reason, count in reasons)
    return (
        f"{_called(use.setting)} packed none of the {len(use.kept)} tensors that graphs save for backward under it "
        f"({why}). Use a hook or policy that takes them, or another scope; "
        "aot_hooks.print_report(aot_hooks.last_plans(compiled)) shows each"
    )


def _fitted_nothing(policy: _ByKey, key: Any, seen: Iterable[str]) -> str:
    names = sorted(filter(None, seen))
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return (
        f"{policy!r}: no tensor that graphs save for backward under it fits {str(key).removeprefix('torch.')!r}; "
        f"{f'they have {shown}' if names else 'they have no such thing'}. Correct the key or take it out"
    )


def compiled_in_place(module: torch.nn.Module) -> None:
    """Warns of a module of torch's own that `module.compile()` was called on: torch makes no graph of it.

    Dynamo traces no function of a file of torch's that it was asked to compile by itself; 2.11 to 2.15.
    """
    forward = getattr(type(module).forward, "__code__", None)
    if forward is not None and forward.co_filename.startswith(_LIBRARIES[0]) and not hasattr(module, "_orig_mod"):
        name = type(module).__name__
        _warn_once(
            (name, "in place"),
            f"torch makes no graph of a {name} that is compiled in place (`module.compile(...)`): it runs eagerly, and "
            "no policy of its options is asked. Use `compiled = torch.compile(module, ...)`, or compile a module of "
            "your own around it",
        )


# --- contexts ---------------------------------------------------------------------------------------------------------


def came_by() -> None:
    """An eager operator saved a tensor on this thread."""
    _local.count += 1


def entered() -> None:
    """A context begins."""
    _local.counts.append(_local.count)


def is_suspect(setting: Setting) -> bool:
    """Whether a context of `setting` that ends now is to be looked at, by `left`."""
    if setting.text not in _contexts and torch.is_grad_enabled():
        return True
    _local.counts.pop()
    return False


def left(setting: Setting) -> None:
    """A context ends: the first one of its setting that saw no tensor is warned of."""
    before = _local.counts.pop()
    _contexts.add(setting.text)
    if _local.count == before and not _is_keep(setting) and sys.exc_info()[0] is None:
        _warn(
            setting,
            "context",
            f"a context of {_called(setting)} saw no saved tensor: no operator saved one eagerly inside it, and no "
            "function that backend='aot_hooks' compiles ran there. Put the context around the forward (backward() "
            "alone saves nothing), compile with backend='aot_hooks', and see that something requires grad",
        )


def traced(setting: Setting) -> None:
    """A tracer runs the pair of `setting`."""
    if setting.text not in _contexts and aot.inlines_hooks() and not _is_keep(setting):
        _contexts.add(setting.text)
        _warn(
            setting,
            "context",
            f"a context of {_called(setting)} is around a function that another backend compiles: nothing that its "
            "graph saves is packed. Use torch.compile(..., backend='aot_hooks')",
        )


def _is_keep(setting: Setting) -> bool:
    return isinstance(setting.rule, Hook) and setting.rule == KEEP


def _called(setting: Setting) -> str:
    rule = setting.rule
    return f"hook '{rule.name}'" if isinstance(rule, Hook) else f"policy {getattr(rule, '__name__', None) or rule!r}"


def _warn(setting: Setting, about: str, message: str) -> None:
    _warn_once((setting.text, about), message)


def _warn_once(about: tuple[str, str], message: str) -> None:
    with _lock:
        known = about in _warned
        _warned.add(about)
    if not known:
        warnings.warn(f"aot_hooks: {message}", UnusedWarning, stacklevel=_level())


def _level() -> int:
    """How many frames above `_warn` the user's code is."""
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):  # "<": code that torch made
        frame, level = frame.f_back, level + 1
    return level
