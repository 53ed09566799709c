"""Errors of gradients, and the search for the tensors that cause them: plain numbers, nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch

from aot_hooks import SavedTensor, float8
from aot_hooks.check import comparison
from aot_hooks.check.causes import Kinds, find
from aot_hooks.check.comparison import Deviation, Error, deviations
from aot_hooks.errors import OptionError
from aot_hooks.graphs.saved import Kind
from aot_hooks.options import Options, check_limit


def offs(*found: tuple[str, bool, float, float]) -> list[Deviation]:
    """Each a name, whether it is a parameter's, a norm, and the norm of the difference."""
    return [Deviation(name, leaf, 1e-7, norm**2, wrong**2) for name, leaf, norm, wrong in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("layout", ["rows", "transposed", "scalar"])
def test_sums_are_those_of_whole_tensors_in_pieces_too(monkeypatch: Any, dtype: Any, layout: str) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 50)
    a = torch.randn((() if layout == "scalar" else (30, 7)), dtype=dtype)
    b = a + 0.1 * torch.randn_like(a)
    a, b = (a.t(), b.t()) if layout == "transposed" else (a, b)
    (found,) = deviations([("w", True)], [a], [b])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert math.isclose(found.norm2, float(a.to(wide).norm() ** 2), rel_tol=1e-6)
    assert math.isclose(found.off2, float((b.to(wide) - a.to(wide)).norm() ** 2), rel_tol=1e-5)


def test_a_gradient_that_is_missing_counts_as_zeros() -> None:
    g = torch.randn(5)
    names = [("a", True), ("b", True), ("c", True)]
    found = {o.name: o for o in deviations(names, [g, None, None], [None, g, None])}
    assert found.keys() == {"a", "b"}
    assert found["a"].error == pytest.approx(1.0) and found["b"].error == math.inf


def test_parameters_and_what_is_passed_on_are_apart_and_vanishing_gradients_are_not_the_worst() -> None:
    found = offs(("w", True, 3.0, 0.3), ("v", True, 4.0, 0.1), ("bias", True, 1e-9, 1e-9), ("x", False, 100.0, 1.0))
    error = Error.of(found)
    assert error.leaves == pytest.approx(math.hypot(0.3, 0.1) / 5.0) and error.passed_on == pytest.approx(0.01)
    assert error.worst is not None and error.worst.name == "w" and error.worst.error == pytest.approx(0.1)


@pytest.mark.parametrize(
    "found, above",
    [
        (offs(("w", True, 1.0, 0.09)), False),
        (offs(("w", True, 1.0, 0.11)), True),
        (offs(("w", True, 1.0, 0.0), ("x", False, 1.0, 0.11)), True),
        (offs(("w", True, 100.0, 0.0), ("b", True, 1.0, 0.4)), False),  # one parameter may be off by more
        (offs(("w", True, 100.0, 0.0), ("b", True, 1.0, 0.6)), True),
        (offs(("w", True, 1.0, math.nan)), True),  # not finite with hooks only
        (offs(("w", True, math.inf, math.nan)), False),  # without them too
        (offs(("w", True, 0.0, 0.0)), False),
        (offs(("w", True, 0.0, 1.0)), True),
        ([], False),
    ],
)
def test_what_is_above_a_limit_of_a_tenth(found: list[Deviation], above: bool) -> None:
    assert Error.of(found).above(0.1) is above


def kinds_of(errors: dict[str, float]) -> dict[Kind, Kinds]:
    rows = [
        SavedTensor(n, n, (2,), torch.float32, torch.device("cpu"), 8, 0, "", "", (), False, False, False)
        for n in errors
    ]
    return {Kind.of(row): Kinds(float8(), row, [i]) for i, row in enumerate(rows)}


def searched(errors: dict[str, float], seen: float) -> tuple[list[str], int]:
    """The causes that are found if the errors add up in squares, and how often the backward ran."""
    runs = 0

    def error_with(some: Collection[Kind]) -> Error:
        nonlocal runs
        runs += 1
        return Error.of(offs(("w", True, 1.0, math.sqrt(sum(errors[kind.op] ** 2 for kind in some)))))

    causes = find(kinds_of(errors), error_with, Error.of(offs(("w", True, 1.0, seen))), 0.1)
    return [each.saved.op for each, _ in causes.found], runs


def test_as_few_causes_as_there_are_the_worst_first() -> None:
    assert searched({"a": 0.03, "b": 0.5, "c": 0.02}, 0.5) == (["b"], 1 + 3 + 1)
    assert searched({"a": 0.2, "b": 0.5, "c": 0.02}, 0.55) == (["b", "a"], 1 + 3 + 2)
    assert searched({"a": 0.09, "b": 0.08, "c": 0.07}, 0.14) == (["a", "b"], 1 + 3 + 2)  # 0.106 without a
    assert searched({"a": 0.5}, 0.5) == (["a"], 1)


def test_a_cause_of_one_small_gradient_is_found_before_harmless_errors_of_large_ones() -> None:
    """The gradient of 'b' is a hundredth of the whole, so that all gradients together are within the limit."""
    large, small = {"a": 0.05, "c": 0.04}, {"b": 0.9}

    def error_with(some: Collection[Kind]) -> Error:
        off = math.sqrt(sum(large.get(kind.op, 0.0) ** 2 for kind in some))
        return Error.of(offs(("w", True, 1.0, off), ("b", True, 0.01, 0.01 * sum(small.get(k.op, 0.0) for k in some))))

    kinds = kinds_of(large | small)
    causes = find(kinds, error_with, error_with(kinds), 0.1)
    assert [(each.saved.op, round(off, 3)) for each, off in causes.found] == [("b", 0.9)]


def test_an_error_that_rounding_does_not_explain_has_no_cause() -> None:
    assert searched({"a": 0.01, "b": 0.02}, 0.5) == ([], 1)
    assert searched({}, 0.5) == ([], 0)


def test_equal_layers_have_one_kind() -> None:
    def kind(path: str, line: str = "model.py:3: y = f(x)") -> Kind:
        row = SavedTensor("y", "f", (2,), torch.float32, torch.device("cpu"), 8, 0, path, line, (), False, False, False)
        return Kind.of(row)

    assert kind("layers.0.mlp") == kind("layers.11.mlp") != kind("layers.0.attention")
    assert kind("conv1") != kind("conv2") and kind("a") != kind("a", "model.py:4: z = f(x)")


@pytest.mark.parametrize("wrong", [1, 0, "yes", None, -0.1, 0.0, math.inf, math.nan, [0.1]])
def test_a_wrong_limit_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"check must be True .* such as 0\.05, or False; got"):
        Options.parse({"check": wrong})


def test_the_limits_that_are_taken() -> None:
    assert (check_limit(True), check_limit(False), check_limit(0.3)) == (0.1, None, 0.3)
