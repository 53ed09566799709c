"""Functions of the packages are short, and take few arguments.

A long function is pieces without names; many parameters are a value without a name. A file may be as long as it likes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 60  # from `def` to the last one, with the docstring
MOST_PARAMETERS = 8  # without `self` and `cls`
# These are longer. A name goes from here with its function; none is added.
LONGER: set[str] = set()


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles it: a kernel takes each pointer, stride and constant by itself."""
    return any(ast.unparse(each).split("(")[0].endswith("jit") for each in function.decorator_list)


def functions_of(source: str) -> Iterator[tuple[ast.FunctionDef, int, int]]:
    """All functions and methods, with their lines and parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1, count  # type: ignore[misc]


def too_large(source: str) -> list[str]:
    return [
        f"{node.name}: {lines} lines, {parameters} parameters"
        for node, lines, parameters in functions_of(source)
        if lines > MOST_LINES or (parameters > MOST_PARAMETERS and not is_kernel(node))
    ]


@pytest.mark.parametrize("package", ["aot_hooks", "cudagraph"])
def test_functions_are_short_and_take_few_arguments(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {each}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for each in too_large(path.read_text(encoding="utf-8"))
    ]
    new = [each for each in found if each.rsplit(":", 1)[0] not in LONGER]
    assert not new, f"at most {MOST_LINES} lines and {MOST_PARAMETERS} parameters; give the pieces names: {new}"
    gone = {each for each in LONGER if each.startswith(package)} - {each.rsplit(":", 1)[0] for each in found}
    assert not gone, f"short now; take them from LONGER: {gone}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a, b, *, c): ...", []),
        ("def f():\n" + "    x = 1\n" * MOST_LINES, [f"f: {MOST_LINES + 1} lines, 0 parameters"]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", []),
        ("def f(a, b, c, d, /, e, f, g, h, *, i): ...", ["f: 1 lines, 9 parameters"]),
        ("@triton.jit(noinline=True)\ndef f(a, b, c, d, e, f, g, h, i): ...", []),
    ],
    ids=["small", "long", "without self", "wide", "kernel"],
)
def test_the_test_finds(source: str, found: list[str]) -> None:
    assert too_large(source) == found
