"""A plan as a picture: saved bytes by module, and live bytes along the step, without and with hooks.

Plan --> bars (module: saved, packed)  +  curves (live_before, live_after)  --> out.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import AotHooksError, OptionError
from ..passes.plan import Plan
from .text import module_bytes

_MIB = 1 << 20  # bytes
_MODULES_SHOWN = 12  # pairs of bars; all other modules are one pair


class MissingExtraError(AotHooksError, ImportError):
    """A package that only some features need is not installed."""


def plot_report(plan: Plan, path: str | Path) -> None:
    """Write the picture to `path`, in the format of its suffix, by default PNG.

    Raises:
        MissingExtraError: without matplotlib.
        OptionError: matplotlib has no such format.
    """
    check_can_plot(path)
    figure = _figure(figsize=(9, 8), layout="constrained")
    bars, curves = figure.subplots(2, 1)
    _bars(bars, plan)
    _curves(curves, plan)
    figure.savefig(path, dpi=120)


def check_can_plot(path: str | Path) -> None:
    """Raises the errors of `plot_report` for this path, before there is a plan to plot."""
    formats = _figure().canvas.get_supported_filetypes()
    ending = Path(path).suffix[1:]
    if ending and ending.lower() not in formats:
        known = ", ".join(sorted(formats))
        raise OptionError(f"cannot plot to {path}: matplotlib has no format {ending!r}; it has {known}")


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtraError(
            'a plot needs matplotlib, which is not installed: pip install "aot-hooks[plot]", or matplotlib alone'
        ) from e
    return Figure(**options)


def _bars(axes: Any, plan: Plan) -> None:
    modules = {name: sizes for name, sizes in module_bytes(plan).items() if any(sizes)}
    shown = dict(list(modules.items())[:_MODULES_SHOWN])
    rest = list(modules.values())[_MODULES_SHOWN:]
    if rest:
        shown[f"({len(rest)} more)"] = (sum(s for s, _ in rest), sum(p for _, p in rest))
    rows = range(len(shown))
    axes.barh([i - 0.2 for i in rows], [s / _MIB for s, _ in shown.values()], 0.4, label="without hooks")
    axes.barh([i + 0.2 for i in rows], [p / _MIB for _, p in shown.values()], 0.4, label="with hooks")
    axes.set_yticks(list(rows), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("saved for backward, MiB")
    axes.set_title(f"{plan.saved_bytes / _MIB:.1f} -> {plan.packed_bytes / _MIB:.1f} MiB")
    axes.legend()


def _curves(axes: Any, plan: Plan) -> None:
    """Draws forward and backward as one half of the step each, however many nodes they have."""
    for label, points in (("without hooks", plan.live_before), ("with hooks", plan.live_after)):
        x: list[float] = []
        for i, phase in enumerate(("forward", "backward")):
            count = sum(p.phase == phase for p in points)
            x += [i + n / max(count - 1, 1) for n in range(count)]
        ordered = sorted(points, key=lambda p: p.phase == "backward")
        axes.plot(x, [p.live_bytes / _MIB for p in ordered], label=label)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.set_ylabel("predicted live bytes, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
