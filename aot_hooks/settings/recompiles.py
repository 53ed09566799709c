"""Hooks that say something else in each step, and so compile in each step: a warning that names what changes.

      step 1   pack over self.scale = 0.5   --> graph 1
      step 2   pack over self.scale = 0.4   --> graph 2      what a hook holds is built into the graph
      ...                                       Dynamo gives up at 8 and runs the function eagerly

Graphs are counted by compiled function and by the code of the hook or policy. Dynamo's guards name what they read.
"""

from __future__ import annotations

import types
import warnings
import weakref
from typing import Any

from ..errors import RecompileWarning
from ..hook import Hook
from ..identity import Record, code_of
from .setting import Setting

__all__ = ["note"]

_WARNS_AT = 4
_known: dict[int, dict[str, list[Record]]] = {}  # by the id of what torch.compile made, which has no hash; by text


def note(compiled: Any, setting: Setting, record: Record) -> None:
    """`compiled`, made by `torch.compile`, has a graph that was made of `record`; warns of rules that keep changing."""
    if not record.answers:
        return
    if id(compiled) not in _known:
        _known[id(compiled)] = {}
        weakref.finalize(compiled, _known.pop, id(compiled), None)
    before = _known[id(compiled)].setdefault(record.text, [])
    if any(other.answers == record.answers for other in before):
        return
    before.append(record)
    if len(before) != _WARNS_AT:
        return
    what = f"hook '{setting.rule.name}'" if isinstance(setting.rule, Hook) else f"policy {_name(setting.rule)}"
    warnings.warn(
        f"{what}{_line(setting.rule)} has been compiled {len(before)} times for one function, because what it holds "
        f"changed: {', '.join(record.changed(before[:-1])) or 'its code'}. What a hook or policy holds is built into "
        "the graph, and each change compiles again. Compute it from the saved tensor inside of pack and return it with "
        "what is packed, hold a value that stays, or run the hook as it is with Hook(..., eager=True)",
        RecompileWarning,
        stacklevel=2,
    )


def _name(policy: Any) -> str:
    return getattr(policy, "__name__", None) or repr(policy)


def _line(rule: Any) -> str:
    code = code_of(rule.pack if isinstance(rule, Hook) else rule)
    if not isinstance(code, types.CodeType):
        return ""
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
