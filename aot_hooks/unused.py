"""Hooks and policies that have no effect: one warning each, with the reason and the way out.

      a graph is compiled under a setting     --compiled-->           tensors packed, keys of policies matched
      the first backward after that           --warning_if_unused-->  nothing packed; a key that matched nothing
      an eager operator saves, a context ends --context_left-->       no tensor was saved, or a budget had no graph
      AOTAutograd traces a pair of ours       --traced-->             another backend compiles the function
      a last layer can't be computed in chunks, or a part of a layer in tiles --left_whole-->  it stays whole
      a graph is compiled under a checkpoint  --checkpointed-->       the checkpoint's own hooks are the innermost
      a forward of a reentrant checkpoint     --recomputed_outside--> the recomputation ran outside of the context
      a graph under other hooks of torch's    --covered-->            they are the innermost

If its graphs packed something, a step pays for a counter in eager parts, and a set lookup when a context ends.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import TORCH, UnusedWarning, warn_user
from .hook import KEEP
from .passes.plan import Decision, Plan
from .passes.regions import RegionRow
from .policies import ByKey, key_text, keys_in
from .settings.setting import Setting
from .steps.schedule import DECIDED_LATER
from .torch_private import aot
from .torch_private.autograd import at_end_of_backward, in_reentrant_forward

_SHOWN = 8  # values beside a key that matches nothing, in a warning
# The share of the bytes that would be saved without checkpoints which hooks must pack; below it a warning names the
# checkpoints. Around each block these leave the blocks' inputs, 0.12 for an MLP of widths 32, 64, 32; around one of six
# such blocks 0.81.
_LITTLE = 0.2
_INSTEAD_OF_CHECKPOINTING = (
    "Take the checkpoint out where the hooks leave enough memory, which costs less time, or a part of its blocks"
)


@dataclass
class _Use:
    """The effect of one setting on the graphs so far.

    Attributes:
        unmatched: keys of its policies that no saved tensor has matched yet.
        seen: for messages, the values compared with the keys, by the function that made the policy.
        kept: decisions that left a tensor, while none packed one.
        packed_bytes: bytes of tensors that decisions packed, before that; None while none packed one.
        checkpointed: bytes of what `torch.utils.checkpoint` computes again in graphs, as if all of it were saved.
        sends: a graph sends tensors to the host, as one may want beside checkpoints.
    """

    setting: Setting
    unmatched: list[tuple[ByKey, Any]]
    seen: dict[str, dict[str, None]] = field(default_factory=dict)
    kept: list[Decision] = field(default_factory=list)
    packed_bytes: int | None = None
    checkpointed: int = 0
    sends: bool = False

    def add(self, decision: Decision) -> None:
        if decision.hook is not KEEP:
            self.packed_bytes = (self.packed_bytes or 0) + decision.saved_bytes
            self.kept.clear()
        elif self.packed_bytes is None:
            self.kept.append(decision)
        self.unmatched = [(policy, key) for policy, key in self.unmatched if not policy.fits(key, decision.saved)]
        for policy, _ in self.unmatched:
            values = map(key_text, policy.kind.values(decision.saved))
            self.seen.setdefault(policy.function, {}).update(dict.fromkeys(values))

    @property
    def packed_nothing(self) -> bool:
        # a budget that is met without hooks has done its work
        budget = getattr(self.setting.rule, "decides_for_graph", False)
        return bool(self.kept) and self.setting.rule != KEEP and not budget

    @property
    def only_beside_checkpoints(self) -> bool:
        """Whether checkpoints of the user's leave it little to do: a small share of what would be saved without."""
        packed = self.packed_bytes or 0
        is_little = packed < _LITTLE * (packed + self.checkpointed)
        return is_little and not self.sends and self.setting.rule != KEEP


_uses: dict[str, _Use] = {}  # by the setting's text
_examined: set[str] = set()  # texts of settings whose contexts need no examination when they end
_recomputed: set[str] = set()  # of settings with forwards of reentrant checkpoints, and no backward yet
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


class _Local(threading.local):
    saved_count = 0  # tensors that eager operators saved in contexts


saves_of_thread = _Local()


def forget() -> None:
    """Forget the effect on graphs. Warnings that were given are not given again."""
    with _lock:
        _uses.clear()
        _recomputed.clear()


def compiled(settings: Iterable[Setting], plans: Sequence[Plan], checkpointed: int = 0) -> list[Setting]:
    """Note the plans of a graph that was compiled under `settings`; `checkpointed`: bytes in checkpoints of it.

    Returns the settings to speak of: those that packed nothing so far, those beside checkpoints, and those with a key
    that matched nothing.
    """
    decisions = [d for plan in plans for d in plan.decisions]
    suspects = []
    is_recomputed = not plans and in_reentrant_forward()
    with _lock:
        for setting in settings:
            use = _uses.setdefault(setting.text, _Use(setting, list(keys_in(setting.rule))))
            # contexts have what the user said, graphs what they get of it
            of_context = Setting(getattr(setting.rule, "asked", setting.rule))
            _examined.add(of_context.text)
            if is_recomputed:
                _recomputed.add(of_context.text)
            elif plans:
                _recomputed.discard(of_context.text)
            use.checkpointed += checkpointed
            use.sends |= any(plan.transfers for plan in plans)
            for d in decisions:
                if setting.key in d.settings:
                    use.add(d)
            if use.unmatched or use.packed_nothing or use.only_beside_checkpoints:
                suspects.append(setting)
    return suspects


def warning_if_unused(run: Callable[..., Any], suspects: list[Setting]) -> Callable[..., Any]:
    """`run`, a compiled graph, which warns after its first backward of those `suspects` that still have no effect.

    By then the other graphs of the step are compiled too.
    """
    if not suspects:
        return run
    waiting = True

    def run_and_warn(*args: Any) -> Any:
        nonlocal waiting
        outputs = run(*args)
        if waiting and at_end_of_backward(outputs, lambda: _warn_of(suspects)):
            waiting = False
        return outputs

    return run_and_warn


def _warn_of(suspects: list[Setting]) -> None:
    """Warn of each of `suspects`: it has packed nothing, or little beside checkpoints, or a key has matched nothing."""
    for setting in suspects:
        use = _uses.get(setting.text)
        if use is None:
            continue
        decided_later = any(DECIDED_LATER in d.reason for d in use.kept)
        if use.packed_nothing and not use.unmatched and not decided_later:
            reasons = collections.Counter(d.reason for d in use.kept).most_common(3)
            why = "; ".join(f"{count} {reason}" for reason, count in reasons)
            if use.checkpointed:
                rest = (
                    ": torch.utils.checkpoint inside of the compiled function has the others "
                    f"computed again, so they are not saved ({why}). {_INSTEAD_OF_CHECKPOINTING}"
                )
            else:
                rest = (
                    f" ({why}). Use a hook or policy that takes them, or another scope; "
                    "aot_hooks.print_report(aot_hooks.last_plans(compiled)) shows each"
                )
            _warn(
                (setting.text, "packed"),
                f"{use.setting.title} packed none of the {len(use.kept)} tensors that graphs save for backward under "
                f"it{rest}",
            )
            if use.checkpointed:
                continue
        elif use.only_beside_checkpoints and not use.unmatched:
            _warn(
                (setting.text, "checkpoints"),
                f"{setting.title} finds little to pack: torch.utils.checkpoint inside of the compiled function has "
                f"its parts computed again, so they are not saved. {_INSTEAD_OF_CHECKPOINTING}",
            )
        for policy, key in use.unmatched:
            names = sorted(filter(None, use.seen.get(policy.function, ())))
            shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
            _warn(
                (setting.text, f"{policy.function} {key}"),
                f"{policy!r}: no tensor that graphs save for backward under it fits {key_text(key)!r}; "
                f"{f'they have {shown}' if names else 'they have no such thing'}. Correct the key or take it out",
            )


def compiled_in_place(module: torch.nn.Module) -> None:
    """Warn if `module.compile()` was called on a module of torch's own: torch makes no graph of it.

    Dynamo traces no function of torch's own files when that is the function to compile; 2.11 to 2.15.
    """
    forward = getattr(type(module).forward, "__code__", None)
    if forward is not None and forward.co_filename.startswith(TORCH) and not hasattr(module, "_orig_mod"):
        name = type(module).__name__
        _warn(
            (name, "in place"),
            f"torch makes no graph of a {name} that is compiled in place (`module.compile(...)`): it runs eagerly, and "
            "no policy of its options is asked. Use `compiled = torch.compile(module, ...)`, or compile a module of "
            "your own around it",
        )


def is_suspect(setting: Setting) -> bool:
    """Whether a context of `setting` that ends now is to be passed to `context_left`."""
    return (setting.text not in _examined or setting.text in _recomputed) and torch.is_grad_enabled()


def context_left(setting: Setting, before: int) -> None:
    """Warn if the first context of `setting` that ends had no effect; `before` is `saved_count` on its entry."""
    if setting.text in _recomputed:
        return recomputed_outside(setting)
    _examined.add(setting.text)
    if setting.rule == KEEP or sys.exc_info()[0] is not None:
        return
    if saves_of_thread.saved_count == before:
        _warn(
            (setting.text, "context"),
            f"a context of {setting.title} saw no saved tensor: no operator saved one eagerly inside it, and no "
            "function that backend='aot_hooks' compiles ran there. Put the context around the forward (backward() "
            "alone saves nothing), compile with backend='aot_hooks', and see that something requires grad",
        )
    elif getattr(setting.rule, "decides_for_graph", False):
        _warn(
            (setting.text, "context"),
            f"a context of {setting.title} had no effect: a budget decides for compiled graphs, and no function that "
            "backend='aot_hooks' compiles ran there. What eager operators save is kept. Compile the model with "
            "torch.compile(..., backend='aot_hooks')",
        )


def traced(setting: Setting) -> None:
    """Warn if AOTAutograd calls the hooks of `setting` while it traces a graph for another backend."""
    if setting.text not in _examined and aot.inlines_hooks() and setting.rule != KEEP:
        _examined.add(setting.text)
        _warn(
            (setting.text, "context"),
            f"a context of {setting.title} is around a function that another backend compiles: nothing that its "
            "graph saves is packed. Use torch.compile(..., backend='aot_hooks'), or aot_hooks.enable()",
        )


def checkpointed(setting: Setting, code: types.CodeType | None = None) -> None:
    """Warn that a graph is compiled without `setting`, under the hooks of `torch.utils.checkpoint`.

    `code`: of the compiled function, if it is known. A budget says so of each: their bytes are not in its plan.
    """
    if getattr(setting.rule, "decides_for_graph", False):
        name = "" if code is None else f" {code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        _warn(
            (setting.text, f"checkpointed{name}"),
            f"{setting.title} does not count the bytes of the compiled function{name} that torch.utils.checkpoint "
            "calls: a step takes what its results and its second run take on top of the budget. Take the checkpoint "
            "out: the budget has functions computed again where that is the least time for the memory",
        )
        return
    _warn(
        (setting.text, "checkpointed"),
        f"{setting.title} does nothing for a compiled function that torch.utils.checkpoint calls: it is computed "
        f"again, so nothing of it is saved. {_INSTEAD_OF_CHECKPOINTING}; or pass use_reentrant=True, with which what "
        "is computed again is packed until its backward",
    )


def recomputed_outside(setting: Setting) -> None:
    """Warn if `setting` ends, and reentrant checkpoints have not computed again under it what they called under it."""
    if setting.text in _recomputed and sys.exc_info()[0] is None:
        _warn(
            (setting.text, "checkpointed"),
            f"{setting.title} packs nothing of a compiled function that torch.utils.checkpoint(use_reentrant=True) "
            "calls: the backward computes it again, and ran outside of the context. Put the context (or enable) "
            f"around the backward too: then what is computed again is packed. Or: {_INSTEAD_OF_CHECKPOINTING}",
        )


def covered(setting: Setting, pack: Callable[..., Any]) -> None:
    """Warn that a graph is compiled without `setting`, which the options ask for, under hooks of torch's."""
    name = getattr(pack, "__qualname__", type(pack).__name__)
    _warn(
        (setting.text, "covered"),
        f"{setting.title} does nothing for a compiled function that is called in another context: the innermost one "
        f"counts alone, which is torch's saved_tensors_hooks (or save_on_cpu) with {name}. Leave that context out",
    )


def left_whole(option: str, found: Sequence[RegionRow]) -> None:
    """Warn of what `options[option]`, "chunk" or "tile", leaves as it is, unless another of the graph is in parts."""
    if not any(row.done for row in found):
        for row in found:
            _warn((row.region, option), f"options[{option!r}]: {row}")


def _warn(about: tuple[str, str], message: str) -> None:
    """Warn once about each subject, at the user's line."""
    if _is_new(about):
        warn_user(f"aot_hooks: {message}", UnusedWarning)


def _is_new(about: tuple[str, str]) -> bool:
    with _lock:
        known = about in _warned
        _warned.add(about)
    return not known
