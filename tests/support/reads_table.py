"""The table of smooth reads in docs/hooks.md, written from `SMOOTH`.

python tests/support/reads_table.py        writes it
"""

from __future__ import annotations

import pathlib
from collections import defaultdict

from aot_hooks.graphs.read_tables import MOST_POWER, SMOOTH, Bound

PAGE = pathlib.Path(__file__).parents[2] / "docs/reads.md"
BEGIN, END = "<!-- table of reads: begin -->\n", "<!-- table of reads: end -->\n"
AGAINST = {"terms": "the terms", "results": "the results", "unit": "the results, at least 1"}


def short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def table() -> str:
    """Rows with equal bounds at equal positions are one line."""
    groups: dict[tuple[tuple[int, Bound], ...], list[str]] = defaultdict(list)
    for name, row in SMOOTH.items():
        groups[tuple(sorted(row.items(), key=lambda item: item[0]))].append(short(name))
    lines = ["| argument, error of the result by the error of its numbers | operators |", "|---|---|"]
    for row, names in groups.items():
        bounds: dict[Bound, list[str]] = defaultdict(list)
        for position, bound in row:
            bounds[bound].append(str(position))
        text = "; ".join(f"{', '.join(ps)}: {b.factor:g} times, of {AGAINST[b.against]}" for b, ps in bounds.items())
        lines.append(f"| {text} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    lines.append(f"| 0: n times, of the results | `pow.Tensor_Scalar` with an exponent n from 1 to {MOST_POWER} |")
    return "\n".join(lines) + "\n"


def parts(page: str) -> tuple[str, str, str]:
    """What stands before, in and behind the table."""
    before, rest = page.split(BEGIN)
    found, after = rest.split(END)
    return before + BEGIN, found, END + after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(before + table() + after)
