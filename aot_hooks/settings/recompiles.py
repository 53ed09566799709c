"""A warning about hooks that change in each step, and so compile in each step, with the names of the changed values.

      step 1   pack over self.scale = 0.5   --> graph 1
      step 2   pack over self.scale = 0.4   --> graph 2      the values that a hook reads are built into the graph
      ...                                       Dynamo gives up at 8 and runs the function eagerly

Graphs are counted by compiled function and by the code of the hook or policy. Dynamo's guards name the values.

A policy of the options holds for compiled calls only. Where Dynamo gives up, it is dropped: one warning says so.
"""

from __future__ import annotations

import types
from typing import Any

from ..errors import RecompileWarning, warn_user
from ..hook import Hook
from ..identity.frozen import code_of
from ..identity.memo import Memo
from ..identity.records import Record
from ..torch_private import dynamo
from .setting import Setting

_WARNS_AT = 4  # compilations of one function, half of Dynamo's limit
_records: Memo[dict[str, list[Record]]] = Memo()  # by the compiled function: text of a setting -> records of its graphs


def note_compilation(compiled: Any, setting: Setting, record: Record) -> None:
    """Note that a graph of `compiled`, made by `torch.compile`, depends on `record`; warn if these keep changing.

    `compiled` is None for a backend that was called by hand.
    """
    if compiled is None or not record.choices:
        return
    before = (_records.get(compiled) or _records.set(compiled, {})).setdefault(record.text, [])
    before[:] = [other for other in before if not other.is_forgotten]
    # the rule does the same as when an earlier graph was compiled: the graphs differ in something else, such as sizes
    if any(other.choices == record.choices or other.matches(setting.rule) for other in before):
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


_said: set[str] = set()


def warn_of_limit(code: types.CodeType | None, setting: Setting) -> None:
    """Warn if Dynamo makes its last version of `code` now, under `setting` of the options: later calls may drop it."""
    if code is None or (limit := dynamo.limit_reached()) is None:
        return
    at = f"'{code.co_name}' ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if at in _said:
        return
    _said.add(at)
    warn_user(
        f"{setting.title} of the options will not reach all calls of {at}: Dynamo has made as many versions of it as "
        f"torch._dynamo.config.recompile_limit allows ({limit}). From now on it runs calls with other sizes or values "
        "eagerly, and there options are not followed. Ways out: put a context around the calls "
        "(aot_hooks.saved_tensors_policy), which eager code follows, too; mark the sizes that change as dynamic "
        "(dynamic=True, torch._dynamo.mark_dynamic); or raise the limit",
        RecompileWarning,
    )
