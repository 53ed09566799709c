"""Python modules that a hook reaches as values: a change of what it may read of them is another hook."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from aot_hooks.bytecode import Import, computes_names, imports, words
from aot_hooks.content import content
from aot_hooks.reached import Reached

pytestmark = pytest.mark.core

NAME = "settings_of_test_content_modules"
settings = sys.modules[NAME] = types.ModuleType(NAME)
SCALE = 2.0


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, settings)
    for name, value in {"scale": 2.0, "other": 1.0, "by": "scale", "read": lambda: settings.scale}.items():
        monkeypatch.setattr(settings, name, value, raising=False)


def helper(module: Any, x: Any) -> Any:
    return x * module.scale


def imported(x: Any) -> Any:
    import settings_of_test_content_modules as c

    return x * c.scale


def imported_from(x: Any) -> Any:
    from settings_of_test_content_modules import scale

    return x * scale


def closed_over() -> Callable[[Any], Any]:
    import settings_of_test_content_modules as c

    return lambda x: x * c.scale


def by_default(x: Any, c: Any = settings) -> Any:
    return x * c.scale


HOLDER = types.SimpleNamespace(c=settings)
WAYS: dict[str, Callable[..., Any]] = {
    "chain": lambda x: x * settings.scale,
    "import": imported,
    "from import": imported_from,
    "closure": closed_over(),
    "default": by_default,
    "attribute": lambda x: x * HOLDER.c.scale,
    "passed on": lambda x: helper(settings, x),
    "getattr": lambda x: x * getattr(settings, "scale"),  # noqa: B009
    "getattr with a default": lambda x: x * getattr(settings, "scale", 1.0),
    "a function": lambda x: x * getattr(settings, "read")(),  # noqa: B009
    "__import__": lambda x: x * __import__("settings_of_test_content_modules").scale,
    "sys.modules": lambda x: x * sys.modules["settings_of_test_content_modules"].scale,
}
BY_ANY_NAME: dict[str, Callable[..., Any]] = {
    "vars": lambda x: x * vars(settings)["scale"],
    "__dict__": lambda x: x * settings.__dict__["scale"],
    "getattr by another": lambda x: x * getattr(settings, settings.by),
    "made up": lambda x: x * getattr(settings, f"sc{'al'.lower()}e"),
}


@pytest.mark.parametrize("way", WAYS | BY_ANY_NAME)
def test_what_is_read_of_a_module_counts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = (WAYS | BY_ANY_NAME)[way]
    before = content(fn)
    assert content(fn) == before
    monkeypatch.setattr(settings, "other", 3.0)
    assert (content(fn) != before) == (way in BY_ANY_NAME)
    monkeypatch.setattr(settings, "other", 1.0)
    monkeypatch.setattr(settings, "scale", 3.0)
    assert content(fn) != before


def test_a_module_in_a_variable_of_what_a_guard_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function made in a compiled one Dynamo's variables are guarded each by itself."""
    code = closed_over().__code__
    before = content(Reached(settings, code, "c"))
    monkeypatch.setattr(settings, "scale", 3.0)
    assert content(Reached(settings, code, "c")) != before


def test_globals_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda x: x * globals()["SCALE"]  # noqa: E731
    before = content(fn)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert content(fn) != before


def test_a_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Any) -> Any:
        import os

        return x * float(os.environ["SCALE_OF_A_TEST"])

    monkeypatch.setenv("SCALE_OF_A_TEST", "2")
    before = content(fn)
    assert content(fn) == before
    monkeypatch.setenv("SCALE_OF_A_TEST", "3")
    assert content(fn) != before


def test_a_module_that_makes_attributes_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"k": 2.0}
    monkeypatch.setattr(settings, "__getattr__", lambda name: made[name], raising=False)
    fn = lambda x: x * helper(settings, settings.k)  # noqa: E731
    before = content(fn)
    made["k"] = 3.0
    assert content(fn) != before


def test_what_is_not_installed_is_left_to_the_hook() -> None:
    def fn(x: Any) -> Any:
        import no_such_module_at_all as c

        return c.pack(x)

    assert content(fn) == content(fn)


def test_imports() -> None:
    def fn() -> Any:
        import os.path
        from collections import OrderedDict, abc

        def inner() -> Any:
            import sys as system

            return system

        return os, OrderedDict, abc, inner

    assert imports(fn.__code__) == (
        Import(0, "os.path", ()),
        Import(0, "collections", ("OrderedDict", "abc")),
        Import(0, "sys", ()),
    )
    assert "OrderedDict" in words(fn.__code__) and "system" not in words(fn.__code__)  # a local


NAMES: dict[str, tuple[Callable[..., Any], bool]] = {
    "plain": (lambda c: c.a, False),
    "getattr": (lambda c: getattr(c, "a"), False),  # noqa: B009
    "a default": (lambda c: getattr(c, "a", 1), False),
    "two": (lambda c: getattr(c, "a", None) + getattr(c, "b", 2), False),
    "a variable": (lambda c, name: getattr(c, name), True),
    "of a call": (lambda c: getattr(c, c.f("a")), True),
    "of a call of another": (lambda c: c.f(getattr(c, c.name), "a"), True),
    "vars": (lambda c: vars(c)["a"], True),
    "inside": (lambda c: [getattr(c, name) for name in "ab"], True),
}


@pytest.mark.parametrize(("fn", "expected"), NAMES.values(), ids=NAMES)
def test_who_makes_names_up(fn: Any, expected: bool) -> None:
    assert computes_names(fn.__code__) == expected
