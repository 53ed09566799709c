"""A plan as text and as data: the bytes that hooks save, the tensors they save them on, and the reasons.

      Plan --fold--> Rows --format_report--> text      decisions that differ in the layer's number only are one row
        |
        +--report_as_data--> dict of numbers and strings      one entry for each tensor, for programs

Each printed column adds up to its total in the header: rounding errors are spread over the rows.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from ..errors import OptionError, in_a_line
from ..hook import KEEP
from ..passes.live_bytes import LivePoint
from ..passes.plan import Decision, Plan, joined
from ..records import NOTHING_SAVED
from ..settings.byte_sizes import SIZES
from ..steps.schedule import Transfer

WIDTH = 110  # characters of a line


@dataclass(frozen=True)
class Row:
    """Equal decisions of one or more layers."""

    decision: Decision  # the first of them
    module_path: str  # of all layers, "layers.0-31.mlp"
    reason: str  # without the number of a node
    tensor_count: int
    saved_bytes: int
    packed_bytes: int


_Path = tuple["str | tuple[int, ...]", ...]  # names and numbers; numbers of folded layers are one tuple
_Groups = dict[tuple[Any, _Path], list[Decision]]  # by what is equal in a row, and the path


def fold(decisions: Sequence[Decision]) -> list[Row]:
    """Rows of decisions that differ only in numbers of the module's path and in nodes' names; the largest first."""
    hooks = {d.hook.name for d in decisions}
    groups: _Groups = defaultdict(list)
    for d in decisions:
        parts = (d.saved.module_path or "").split(".")
        path: _Path = tuple((int(part),) if part.isdecimal() else part for part in parts)
        groups[_group_key(d, hooks), path].append(d)
    for position in reversed(range(max((len(path) for _, path in groups), default=0))):
        groups = _fold_at(position, groups)
    rows = [
        Row(
            decision=members[0],
            module_path=".".join(part if isinstance(part, str) else _ranges(part) for part in path),
            reason=_reason(members[0], hooks),
            tensor_count=len(members),
            saved_bytes=sum(d.saved_bytes for d in members),
            packed_bytes=sum(d.packed_bytes for d in members),
        )
        for (_, path), members in groups.items()
    ]
    return sorted(rows, key=lambda r: (-max(r.saved_bytes, r.packed_bytes), -r.tensor_count))


def _fold_at(position: int, groups: _Groups) -> _Groups:
    """Merges the groups of equal sizes whose paths differ only in the number at `position`."""
    alike: dict[Any, list[tuple[_Path, list[Decision]]]] = defaultdict(list)
    for (group_key, path), members in groups.items():
        size = (len(members), sum(d.saved_bytes for d in members), sum(d.packed_bytes for d in members))
        rest = (*path[:position], None, *path[position + 1 :])
        numbered = position < len(path) and isinstance(path[position], tuple)
        alike[group_key, rest if numbered else path, size].append((path, members))
    folded: _Groups = {}
    for (group_key, _, _), found in alike.items():
        path = found[0][0]
        if len(found) > 1:
            numbers = sorted({n for p, _ in found for n in p[position]})
            path = (*path[:position], tuple(numbers), *path[position + 1 :])  # type: ignore[arg-type]
        folded[group_key, path] = [d for _, members in found for d in members]
    return folded


def _group_key(d: Decision, hooks: set[str]) -> Any:
    """What all decisions of a row have in common beside their path and size."""
    s = d.saved
    flags = (s.is_input, s.is_output, s.is_static)
    where = (s.device, s.source_line, s.checkpoint_names)
    return s.op, s.shape, s.dtype, where, s.backward_ops, flags, d.hook, _reason(d, hooks)


def _reason(d: Decision, hooks: set[str]) -> str:
    """The reason; a tensor's name in it ('gelu_1') becomes its kind ('gelu')."""
    return re.sub(r"'(\w+?)_\d+'", lambda m: m[0] if m[0][1:-1] in hooks else f"'{m[1]}'", d.reason)


def _ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def format_report(
    plan: Plan | Sequence[Plan], *, measured_peak_bytes: int | None = None, measured_optimizer_bytes: int | None = None
) -> str:
    """The report as text: bytes saved for backward with and without hooks, by tensor, with the reasons.

    Args:
        plan: a result of `aot_hooks.plan`, or of `aot_hooks.last_plans(compiled)`, which predicts no live bytes.
        measured_peak_bytes: the allocator's peak in forward and backward, over the bytes before the step.
        measured_optimizer_bytes: likewise during the optimizer's step.

    Raises:
        OptionError: `plan` is something else.
    """
    if not isinstance(plan, Plan):
        given: Any = plan
        if not isinstance(given, list | tuple) or not all(isinstance(p, Plan) for p in given):
            raise OptionError(
                f"format_report: expected a Plan, or a list of them as of last_plans, got {in_a_line(plan)}"
            )
        plan = joined(plan)
    if not plan.decisions:
        return NOTHING_SAVED
    saved, packed = plan.saved_bytes, plan.packed_bytes
    unit, size = next((u for u in SIZES if max(saved, packed) >= u[1]), SIZES[-1])
    rows = fold(plan.decisions)
    counting = [r for r in rows if r.saved_bytes or r.packed_bytes]
    saved_column = dict(zip(counting, _spread([r.saved_bytes for r in counting], size), strict=True))
    packed_column = dict(zip(counting, _spread([r.packed_bytes for r in counting], size), strict=True))

    packed_count = sum(d.hook is not KEEP for d in plan.decisions)
    lines = [
        f"saved for backward: {_number(saved, size)} -> {_number(packed, size)} {unit} "
        f"({packed / saved if saved else 1:.3f}); {packed_count} of {len(plan.decisions)} tensors packed, "
        f"{float(_number(saved, size)) - float(_number(packed, size)):.2f} {unit} back",
        *_peak_lines(plan, size, unit),
        *_measured_lines(plan, measured_peak_bytes, measured_optimizer_bytes, size, unit),
        *map(_cut, _chunk_lines(plan, size, unit)),
        *map(_cut, _tile_lines(plan, size, unit)),
        *map(_cut, _transfer_lines(plan.transfers, size, unit)),
        "",
        f"{f'saved_{unit}':>10} {f'packed_{unit}':>11} {'tensors':>8}  what, where / how and why",
    ]
    for title, is_packed in (("packed", True), ("stays", False)):
        section = [r for r in counting if (r.decision.hook is not KEEP) == is_packed]
        if section:
            lines.append(f"{title}:")
        for row in section:
            lines += _row_lines(row, f"{saved_column[row]:10.2f} {packed_column[row]:11.2f} {row.tensor_count:8}  ")
    free: Counter[str] = Counter()
    for row in rows:
        if row not in saved_column:
            free[_how(row)] += row.tensor_count
    if free:
        lines.append("counts nothing, because it is alive anyway or counted above:")
    for how, count in free.most_common():
        lines.append(_cut(f"{0:10.2f} {0:11.2f} {count:8}  {how}"))
    return "\n".join(lines)


def print_report(plan: Plan | Sequence[Plan], file: TextIO | None = None) -> None:
    """Write `format_report(plan)` to `file`, by default the standard output."""
    print(format_report(plan), file=file or sys.stdout)


def _row_lines(row: Row, numbers: str) -> list[str]:
    """The two lines of a row: what is saved, after its `numbers`; and how and why."""
    s = row.decision.saved
    dtype = str(s.dtype).removeprefix("torch.")
    what = f"{_short(s.op)} {dtype}[{', '.join(map(str, s.shape))}]"
    named = f"named {', '.join(map(repr, s.checkpoint_names))}" if s.checkpoint_names else ""
    where = "  ".join(part for part in (what, named, row.module_path, s.source_line) if part)
    readers = ", ".join(map(_short, s.backward_ops))
    how = f"{_how(row)}; read by {readers}" if readers else _how(row)
    return [_cut(numbers + where), _cut(" " * 12 + how)]


def _how(row: Row) -> str:
    return f"{row.decision.hook.name}: {row.reason}"


def _peak_lines(plan: Plan, size: int, unit: str) -> list[str]:
    """The predicted peak and where it stands; in a step of many calls, its terms too. `size` bytes are one `unit`."""
    if not plan.live_before or not plan.live_after:
        return []
    before, after = _peak(plan.live_before), _peak(plan.live_after)
    stock = "" if plan.stock_peak_bytes is None else f"{_number(plan.stock_peak_bytes, size)} -> "
    lines = [f"predicted peak of the step, over parameters and inputs: {stock}{_number(plan.peak_bytes, size)} {unit}"]
    if (step := plan.in_step) is not None:  # its points are those of graphs beside others as planned
        lines.append(
            f"  of a step in which {step.calls} calls of one graph hold saved tensors at the same time, "
            f"{_number(step.held_bytes, size)} {unit} each"
        )
        if step.tight_calls:
            lines.append(
                f"  the first {step.tight_calls} of them hold the least: {_number(step.tight_bytes, size)} {unit}"
            )
        lines.append(
            f"  other graphs, gradients, gathered parameters, a loss beside them: "
            f"{_number(step.other_bytes, size)} {unit}"
        )
        if after.live_bytes == plan.peak_bytes:
            lines.append(_cut(f"  with hooks it stands {_place(after)}"))
        return lines
    lines.append(_cut(f"  it stands {_place(before)}"))
    decrease, saving = before.live_bytes - after.live_bytes, plan.saved_bytes - plan.packed_bytes
    if saving <= 0:
        return lines
    if _place(after) != _place(before):
        lines.append(_cut(f"  with hooks {_place(after)}"))
    if decrease < saving / 2:
        by, of = _number(abs(decrease), size), f"{_number(saving, size)} {unit} that come back"
        change = f"falls by {by} of the" if decrease >= 0 else f"rises by {by} in spite of the"
        lines.append(f"  it {change} {of}: at that place other tensors are alive than saved ones")
    return lines


def _measured_lines(plan: Plan, peak: int | None, optimizer: int | None, size: int, unit: str) -> list[str]:
    """The measured peak, and why it is not the predicted one. `peak`, `optimizer`: bytes; see `format_report`."""
    if peak is None:
        return []
    lines = [f"measured peak of forward and backward, over what was allocated before: {_number(peak, size)} {unit}"]
    if optimizer is not None and optimizer > peak:
        lines.append(f"  the step's peak cannot fall further: it stands in the optimizer, {_number(optimizer, size)}")
    elif plan.live_after and peak > 1.25 * plan.peak_bytes:
        lines.append("  more than predicted: the rest is outside of the planned graphs, or inside of operators")
    return lines


def _chunk_lines(plan: Plan, size: int, unit: str) -> list[str]:
    """One line for each last layer that is computed in chunks of tokens, and two for each that is not."""
    lines = []
    for row in plan.chunked:
        whole, part = (f"{_number(nbytes, size)} {unit}" for nbytes in (row.logit_bytes, row.chunk_bytes))
        if row.done:
            saves = _number(row.logit_bytes - row.chunk_bytes, size)
            lines.append(
                f"loss in {row.how}: {row.tokens} tokens and {part} of {whole} of logits at a time, {saves} less for "
                f"each value of their size  {row.region}"
            )
            continue
        lines.append(f"logits of {whole} {'hold the peak and ' if row.holds_peak else ''}stay whole  {row.region}")
        lines.append(f"  {row.how}")
    return lines


def _tile_lines(plan: Plan, size: int, unit: str) -> list[str]:
    """One line for each kind of part that is computed in tiles of tokens, and two for each that is not."""
    lines = []
    for row, times in Counter(plan.tiled).items():
        layers = f"{times} parts" if times > 1 else "a part"
        whole, tile = (f"{_number(nbytes, size)} {unit}" for nbytes in (row.working_bytes, row.tile_bytes))
        if row.done:
            lines.append(f"{layers} in {row.how}: {row.tokens} tokens and {tile} of {whole} at a time  {row.region}")
            continue
        lines.append(f"{layers} of a layer not in tiles  {row.region}")
        lines.append(f"  {row.how}")
    return lines


def _transfer_lines(transfers: Sequence[Transfer], size: int, unit: str) -> list[str]:
    """What `offload` sends, when, and why the rest stays; none without such a hook. `size` bytes are one `unit`.

    Times are estimates, in milliseconds from the start of the tensor's own forward and backward graph.
    """
    if not transfers:
        return []
    sent = [t for t in transfers if t.placement.offloaded]
    all_bytes, sent_bytes = (sum(t.nbytes for t in some) for some in (transfers, sent))
    # the devices of a graph share its steps, each with its own rates
    compute = sum({t.graph: t.forward_ms + t.backward_ms for t in reversed(transfers)}.values())
    all_stall = sum({(t.graph, t.device): t.full_stall_ms for t in transfers}.values())
    stall = sum(t.placement.stall_ms for t in sent)
    lines = [
        f"offload: {sent_bytes / size:.2f} of {all_bytes / size:.2f} {unit} go to the host; predicted stall "
        f"{stall:.1f} ms of a step of {compute:.1f} ms"
    ]
    if all_stall > stall:
        lines.append(
            f"  the compute is too short for the rest: all that is worth sending would stall it {all_stall:.1f} ms"
        )
    if sent:
        lines.append(f"{unit:>10}  forward: start    wait  backward: reload     use   slack   stall ms  tensor")
    for t in sent:
        p = t.placement
        lines.append(
            f"{t.nbytes / size:10.3f}  {p.start_ms:14.1f} {p.wait_ms:7.1f} {p.reload_ms:17.1f} {p.use_ms:7.1f} "
            f"{p.slack_ms:7.1f} {p.stall_ms:10.1f}  {t.name}"
        )
    stays: dict[str, list[int]] = defaultdict(list)
    for t in transfers:
        if not t.placement.offloaded:
            stays[t.placement.reason].append(t.nbytes)
    lines += [f"{sum(sizes) / size:10.3f}  in {len(sizes)} stays: {reason}" for reason, sizes in stays.items()]
    return lines


def _peak(points: Sequence[LivePoint]) -> LivePoint:
    return max(points, key=lambda p: p.live_bytes)


def _place(point: LivePoint) -> str:
    where = "  ".join(part for part in (point.module_path, point.source_line) if part)
    return f"in the {point.phase} at '{point.node}'" + (f": {where}" if where else "")


def _number(nbytes: int, size: int) -> str:
    return f"{nbytes / size:.2f}"


def _spread(values: Sequence[int], size: int) -> list[float]:
    """`values` in units of `size`, rounded to hundredths that add up to the rounded sum."""
    exact = [100 * v / size for v in values]
    whole = [int(e) for e in exact]
    missing = round(100 * sum(values) / size) - sum(whole)
    for i in sorted(range(len(values)), key=lambda i: whole[i] - exact[i])[:missing]:
        whole[i] += 1
    return [w / 100 for w in whole]


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def report_as_data(plan: Plan | Sequence[Plan]) -> dict[str, Any]:
    """The plan in numbers, strings, lists and dicts, for `json.dump`. Keys are stable; new ones may be added."""
    plan = plan if isinstance(plan, Plan) else joined(plan)
    points = {"before": plan.live_before, "after": plan.live_after}
    return {
        "version": 1,
        "totals": {
            "saved_bytes": plan.saved_bytes,
            "packed_bytes": plan.packed_bytes,
            "tensor_count": len(plan.decisions),
            "packed_tensor_count": sum(d.hook is not KEEP for d in plan.decisions),
            "predicted_peak_before_bytes": plan.stock_peak_bytes,
            "predicted_peak_after_bytes": plan.peak_bytes or None,
        },
        "rows": [_decision_as_data(d) for d in plan.decisions],
        "transfers": _transfers_as_data(plan.transfers),
        "chunked": [_split_as_data("layer", row) for row in plan.chunked],
        "tiled": [_split_as_data("part", row) for row in plan.tiled],
        **{f"live_{k}": [vars(p).copy() for p in v] for k, v in points.items()},
    }


_FLAT = ("name", "op", "storage", "module_path", "source_line", "is_input", "is_output", "is_static")


def _decision_as_data(d: Decision) -> dict[str, Any]:
    """One entry of the rows: the fields of the saved tensor, and what is done with it."""
    s = d.saved
    return {name: getattr(s, name) for name in _FLAT} | {
        "shape": [int(n) for n in s.shape],
        "dtype": str(s.dtype).removeprefix("torch."),
        "device": str(s.device),
        "storage_bytes": s.nbytes,
        "checkpoint_names": list(s.checkpoint_names),
        "backward_ops": list(s.backward_ops),
        "hook": d.hook.name,
        "reason": d.reason,
        "saved_bytes": d.saved_bytes,
        "packed_bytes": d.packed_bytes,
    }


def _split_as_data(name: str, row: Any) -> dict[str, Any]:
    """A row of chunks or tiles, without the nodes of graphs; `name`: what the region is."""
    return {name: row.region} | {k: v for k, v in asdict(row).items() if k not in ("node", "logits", "wide", "place")}


def _transfers_as_data(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """A dict for each transfer; the fields of its placement stand in the same dict."""
    rows = []
    for t in transfers:
        row = asdict(t)
        placement = row.pop("placement")
        # `row` again: its names of nodes replace the numbers of gaps, which say less
        rows.append(row | placement | {"slack_ms": t.placement.slack_ms} | row)
    return rows


def module_bytes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Saved and packed bytes by module, numbers folded away ("layers.*.mlp"), the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for d in plan.decisions:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", d.saved.module_path) or "(no module)"
        saved, packed = found.get(name, (0, 0))
        found[name] = (saved + d.saved_bytes, packed + d.packed_bytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
