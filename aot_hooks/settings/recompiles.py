"""A warning about hooks that change in each step, and so compile in each step, with the names of the changed values.

      step 1   pack over self.scale = 0.5   --> graph 1
      step 2   pack over self.scale = 0.4   --> graph 2      the values that a hook reads are built into the graph
      ...                                       Dynamo gives up at 8 and runs the function eagerly

Graphs are counted by compiled function and by the code of the hook or policy. Dynamo's guards name the values.
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
# id of a compiled function (some have no hash) -> text of a setting -> records of its graphs
_records: dict[int, dict[str, list[Record]]] = {}


def note(compiled: Any, setting: Setting, record: Record) -> None:
    """Note that a graph of `compiled`, made by `torch.compile`, depends on `record`; warn if these keep changing."""
    if not record.choices:
        return
    if id(compiled) not in _records:
        _records[id(compiled)] = {}
        weakref.finalize(compiled, _records.pop, id(compiled), None)
    before = _records[id(compiled)].setdefault(record.text, [])
    if any(other.choices == record.choices for other in before):
        return
    before.append(record)
    if len(before) != _WARNS_AT:
        return
    warnings.warn(
        f"{setting.title}{_line(setting.rule)} has been compiled {len(before)} times for one function, because "
        f"what it holds changed: {', '.join(record.changed(before[:-1])) or 'its code'}. What a hook or policy holds "
        "is built into the graph, and each change compiles again. Compute it from the saved tensor inside of pack and "
        "return it with what is packed, hold a value that stays, or run the hook as it is with Hook(..., eager=True)",
        RecompileWarning,
        stacklevel=2,
    )


def _line(rule: Any) -> str:
    code = code_of(rule.pack if isinstance(rule, Hook) else rule)
    if not isinstance(code, types.CodeType):
        return ""
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
