"""Sets in hooks and policies: their order is another in each process, and their members may know the set that holds
them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aot_hooks.content import content, read
from aot_hooks.dynamo.pending import Pending, changed_before
from aot_hooks.examine import examined

pytestmark = pytest.mark.core

GAIN = 2.0
settings = types.ModuleType("settings_of_test_content_sets")


def helper(x: Any) -> Any:
    return x * GAIN


def scale(by: Any) -> Callable[[Any], Any]:
    return lambda x: (x, by)


class Token(tuple[str, ...]):
    """As pygments' types of tokens are: each knows its parent, and has its children in a set and by name."""

    def __init__(self, *_: Any) -> None:
        self.parent: Token | None = None
        self.children: set[Token] = set()
        self.colour = "none"

    def child(self, name: str, colour: str = "none") -> Token:
        made = Token((*self, name))
        made.parent, made.colour = self, colour
        self.children.add(made)
        setattr(self, name, made)
        return made


def tokens(names: Iterable[str], **colours: str) -> Token:
    """A tree whose tokens are made in the order of `names`."""
    root = Token()
    made = {name: root.child(name, colours.get(name, "none")) for name in names}
    for name in sorted(names):
        for kind in ("single", "double"):
            made[name].child(kind, colours.get(kind, "none"))
    return root


class Node:
    """Knows its neighbours, all of them alike to look at."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight, self.near = weight, set[Node]()


def ring(*weights: float) -> Node:
    nodes = [Node(weight) for weight in weights]
    for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        a.near.add(b)
        b.near.add(a)
    return nodes[0]


@pytest.mark.parametrize("say", [content, lambda value: examined(value).parts])
def test_members_that_reach_the_set_are_read(say: Callable[[Any], Any]) -> None:
    tree = say(scale(tokens("abc")))
    assert tree == say(scale(tokens("abc")))
    assert tree != say(scale(tokens("abd")))
    assert tree != say(scale(tokens("abc", b="red")))
    assert tree != say(scale(tokens("abc", double="red")))
    assert say(scale(tokens("abc").a)) != say(scale(tokens("abc").b))  # type: ignore[attr-defined]


@pytest.mark.parametrize("say", [content, lambda value: examined(value).parts])
def test_members_that_know_each_other_by_sets_are_read(say: Callable[[Any], Any]) -> None:
    assert say(ring(1.0, 2.0, 3.0, 4.0)) == say(ring(1.0, 2.0, 3.0, 4.0))
    assert say(ring(1.0, 2.0, 3.0, 4.0)) != say(ring(1.0, 2.0, 3.0, 5.0))
    assert say(ring(1.0, 2.0, 3.0, 4.0)) != say(ring(1.0, 2.0, 4.0, 3.0))
    assert say(ring(*[1.0] * 12)) == say(ring(*[1.0] * 12)) != say(ring(*[1.0] * 11))


def test_everybody_knows_everybody() -> None:
    def crowd(count: int) -> list[Node]:
        nodes = [Node(float(i)) for i in range(count)]
        for node in nodes:
            node.near.update(nodes)
        return nodes

    assert content(crowd(24)) == content(crowd(24)) != content(crowd(23))


@pytest.mark.parametrize(
    "members",
    [
        lambda: [1, 2.0, "three", None, (4, 5), (4, 6)],
        lambda: [scale(1), scale(2), scale("3")],
        lambda: [frozenset({(1, frozenset({"a"}))}), frozenset({(1, frozenset({"b"}))})],
        lambda: [Node(1.0), Node(2.0), Node(2.0)],
        lambda: [helper, print, Node, Token],
    ],
)
def test_a_set_has_no_order(members: Callable[[], list[Any]]) -> None:
    said, parts = content(set(members())), examined(set(members())).parts
    for _ in range(8):
        keep = [Node() for _ in range(7)]  # other addresses, so another order
        assert content(set(reversed(members()))) == said and examined(set(members())).parts == parts
        del keep
    assert content(set(members()[1:])) != said


def test_what_a_member_reaches_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = scale(frozenset({helper}))
    found = read(hook)
    assert found.is_still(hook)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    assert not found.is_still(hook) and content(hook) != found.digest


def test_a_member_that_changes_is_seen() -> None:
    node = Node(1.0)
    hook = scale(frozenset({node}))
    found = read(hook)
    node.weight = 2.0
    assert not found.is_still(hook) and content(hook) != found.digest


def test_names_in_a_set_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`getattr(module, name) for name in {"twice"}` reads the function, as with a tuple of names."""
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    def by_name(names: Any) -> Callable[[Any], Any]:
        module = settings
        return lambda x: [getattr(module, name)(x) for name in names]

    for names in (("twice",), {"twice"}):
        monkeypatch.setattr(settings, "twice", lambda x: x * 2, raising=False)
        before = content(by_name(names))
        monkeypatch.setattr(settings, "twice", lambda x: x * 3)
        assert content(by_name(names)) != before


def test_what_is_pending_is_found_in_a_set() -> None:
    node = Node(1.0)
    pending = Pending({id(node): None}, frozenset(), {}, frozenset())
    assert changed_before(scale(frozenset({node})), pending) == "a Node"
    assert changed_before(scale(frozenset({Node(1.0)})), pending) is None
