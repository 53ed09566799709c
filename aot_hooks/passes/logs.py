"""Graphs in the log "aot_hooks" (`TORCH_LOGS="+aot_hooks"`) and in torch's structured trace."""

from __future__ import annotations

import logging

from torch.fx import GraphModule

from ..torch_private import values as torch_values

__all__ = ["log", "show"]

log = logging.getLogger("aot_hooks")


def show(title: str, gm: GraphModule) -> None:
    def text() -> str:
        return str(gm.print_readable(print_output=False))

    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", title, text())
    torch_values.trace_structured("aot_hooks_" + title.replace(" ", "_").replace("'", ""), text)
