"""A warning about hooks that change in each step, and so compile in each step, with the names of the changed values.

      step 1   pack over self.scale = 0.5   --> graph 1
      step 2   pack over self.scale = 0.4   --> graph 2      the values that a hook reads are built into the graph
      ...                                       Dynamo gives up at 8 and runs the function eagerly

Graphs are counted by compiled function and by the code of the hook or policy. Dynamo's guards name the values.
"""

from __future__ import annotations

import types
from typing import Any

from ..errors import RecompileWarning, warn_user
from ..hook import Hook
from ..identity.frozen import code_of
from ..identity.memo import Memo
from ..identity.records import Record
from .setting import Setting

_WARNS_AT = 4
_records: Memo[dict[str, list[Record]]] = Memo()  # by the compiled function: text of a setting -> records of its graphs


def note(compiled: Any, setting: Setting, record: Record) -> None:
    """Note that a graph of `compiled`, made by `torch.compile`, depends on `record`; warn if these keep changing.

    `compiled` is None for a backend that was called by hand.
    """
    if compiled is None or not record.choices:
        return
    before = (_records.get(compiled) or _records.set(compiled, {})).setdefault(record.text, [])
    if any(other.choices == record.choices for other in before):
        return
    before.append(record)
    if len(before) != _WARNS_AT:
        return
    code = code_of(setting.rule.pack if isinstance(setting.rule, Hook) else setting.rule)
    is_code = isinstance(code, types.CodeType)
    line = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if is_code else ""
    warn_user(
        f"{setting.title}{line} has been compiled {len(before)} times for one function, because "
        f"what it holds changed: {', '.join(record.changed(before[:-1])) or 'its code'}. What a hook or policy holds "
        "is built into the graph, and each change compiles again. Compute it from the saved tensor inside of pack and "
        "return it with what is packed, hold a value that stays, or run the hook as it is with Hook(..., eager=True)",
        RecompileWarning,
    )
