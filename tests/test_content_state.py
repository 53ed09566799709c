"""Digests of what changes or travels: tensors by their bytes, modules by their state, all of it in another process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from digested import scale

from aot_hooks.content import content, read

pytestmark = pytest.mark.core


# --- tensors ---------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros(2, 2)
TENSORS = {
    "value": torch.ones(2, 2),
    "dtype": torch.zeros(2, 2, dtype=torch.int32),
    "shape": torch.zeros(4),
    "more": torch.zeros(2, 2, 1),
    "sign of zero": -torch.zeros(2, 2),
    "device": torch.zeros(2, 2, device="meta"),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_differ_by(case: str) -> None:
    assert content(TENSORS[case]) != content(ZEROS)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].fill_(2), lambda x: x.detach().add_(1)])
def test_a_tensor_changed_in_place_is_another(change: Any) -> None:
    x = torch.zeros(2, 2)
    hook = scale(x)
    before = content(hook)
    change(x)
    assert content(hook) != before


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (1000, 1001)])
def test_what_is_written_past_autograd_is_noticed_on_the_cpu(shape: tuple[int, ...]) -> None:
    """`x.data` has a version of its own. Small tensors are read each time, of large ones a thousand numbers."""
    for x in (torch.zeros(shape), torch.zeros(shape[::-1]).t(), torch.zeros(*shape, 2)[..., 0]):
        digests = [content(x)]
        for write in (lambda x: x.add_(1), lambda x: x[-1, -1].add_(1), lambda x: x[0, 0].add_(1)):
            write(x.data)
            digests.append(content(x))
        assert len({*digests}) == 4 and content(x) == digests[-1]


def test_footgun_one_number_written_past_autograd_goes_unseen_in_a_large_tensor_until_it_is_said() -> None:
    x = torch.zeros(1000, 1000)
    before = content(x)
    x.data.view(-1)[1] = 1
    assert content(x) == before
    torch.autograd.graph.increment_version(x)
    assert content(x) != before


def test_other_memory_is_told_from_what_was_there_before() -> None:
    """The allocator gives an address anew as soon as it is free."""
    x, digests = torch.zeros(1000, 1000), set()
    for i in range(8):
        x.data = torch.zeros(1000, 1000)
        x.data.view(-1)[1] = i
        digests.add(content(x))
    assert len(digests) == 8


def test_a_view_shows_changes_of_its_base() -> None:
    base = torch.zeros(4)
    view = base[1:]
    before = content(view)
    base.fill_(1)
    assert content(view) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint8])
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    one, other = torch.zeros(3).to(dtype), torch.ones(3).to(dtype)
    assert content(one) == content(torch.zeros(3).to(dtype)) != content(other)


def test_a_freed_tensor_gives_its_digest_to_nobody() -> None:
    """Digests are remembered by `id`, which the next tensor may get."""
    digests = {content(torch.full((3,), float(i))) for i in range(300)}
    assert len(digests) == 300


# --- other processes -------------------------------------------------------------------------------------------------

PROGRAM = """
import enum, functools, math, torch, aot_hooks
from dataclasses import dataclass
from aot_hooks.content import content, read
class Color(enum.Enum): RED = 1
K, NAMES, TABLE = 2.5, {"b", "a", "c"}, torch.arange(5.0)
class Times:
    def __init__(self, k): self.k = k
    def __call__(self, x): return x * self.k
@dataclass
class Data:
    k: int
def helper(x): return x in {"x", "y", "z"} or math.sin(x)
def pack(x):
    return helper(x) * K, NAMES, TABLE, Color.RED, Data(1), torch.ops.aten.sin.default, torch.sin, torch.Tensor.sin
def make(k): return lambda x: x * k
values = [pack, make(3), make("s"), make(TABLE), Times(2), functools.partial(helper, 1), frozenset("abc"), torch.relu,
    torch.nn.Linear, torch.nn.functional.gelu, torch.fx.symbolic_trace(lambda x: torch.sin(x) + 1), aot_hooks.float8(),
    len, print, int, Data, Times, aot_hooks.Hook("h", pack, make(1)), torch.strided, torch.channels_last]
print(" ".join(content(v) for v in values))
"""


def test_the_same_in_every_process(tmp_path: Any) -> None:
    def digests(seed: str, folder: str) -> list[str]:
        path = tmp_path / folder
        path.mkdir()
        (path / "program.py").write_text(PROGRAM)
        root = os.path.dirname(os.path.dirname(__file__))
        paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, path / "program.py"], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    one, other = digests("1", "here"), digests("2", "elsewhere")
    assert [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b] == []
    assert len(set(one)) == len(one)


# --- whether what was read says the same later -----------------------------------------------------------------------


class Based:
    z = 1


class Held(Based):
    k = 1
    table: ClassVar[dict[str, int]] = {"a": 1}


class Others:
    z = 2


ITEMS: dict[str, Any] = {"k": [1, 2], "t": torch.ones(3)}


def uses_all(x: Any, more: Any = (1,), *, factor: Any = 2) -> Any:
    return x * ITEMS["k"][0] * Held().k * uses_all.said * more[0] * factor  # type: ignore[attr-defined]


uses_all.said = 1  # type: ignore[attr-defined]
PARTIAL = functools.partial(uses_all, factor=3)

CHANGES: dict[str, tuple[Any, str, Any]] = {
    "item": (ITEMS, "k", [3]),
    "new item": (ITEMS, "new", 3),
    "tensor in a dict": (ITEMS, "t", torch.zeros(3)),
    "item of an item": (ITEMS["k"], 0, 3),
    "class": (Held, "k", 3),
    "item of a class": (Held.table, "a", 3),
    "new member": (Held, "new", 3),
    "base": (Based, "z", 3),
    "bases": (Held, "__bases__", (Others,)),
    "attribute of a function": (uses_all, "said", 3),
    "defaults": (uses_all, "__defaults__", ((3,),)),
    "defaults by name": (uses_all, "__kwdefaults__", {"factor": 5}),
    "default by name": (uses_all.__kwdefaults__, "factor", 5),
    "code": (uses_all, "__code__", (lambda x, more=(1,), *, factor=2: x).__code__),
    "partial": (PARTIAL.keywords, "factor", 4),
}


@contextlib.contextmanager
def changed(where: Any, name: Any, value: Any) -> Iterator[None]:
    if isinstance(where, dict | list):
        get, put, drop = (lambda: where[name]), where.__setitem__, where.__delitem__
    else:
        get = lambda: getattr(where, name)  # noqa: E731
        put, drop = functools.partial(setattr, where), functools.partial(delattr, where)
    try:
        before = [get()]
    except (KeyError, AttributeError):
        before = []
    put(name, value)
    try:
        yield
    finally:
        if before:
            put(name, before[0])
        else:
            drop(name)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_read_is_not_still_the_same_after(change: str) -> None:
    """And it is known without reading all of it anew: nothing in it is of a kind that could change unseen."""
    found = read(PARTIAL)
    assert not found.may_change and found.is_still(PARTIAL)
    with changed(*CHANGES[change]):
        assert not found.is_still(PARTIAL) and content(PARTIAL) != found.digest
    assert found.is_still(PARTIAL)


def test_of_what_an_attribute_holds_that_counts_which_is_read() -> None:
    """A config that others count steps in: `self.cfg.k` is the number, `use(self.cfg)` all of it."""
    cfg = types.SimpleNamespace(k=2, step=0, inner=types.SimpleNamespace(k=3, step=0))

    class Reads:
        def __init__(self) -> None:
            self.cfg = cfg

        def pack(self, x: Any) -> Any:
            return x * self.cfg.k * self.cfg.inner.k

        def pack_inside(self, x: Any) -> Any:
            return [y * self.cfg.k * self.cfg.inner.k for y in x]

        def all_of_it(self, x: Any) -> Any:
            return x * self.cfg.k * len(vars(self.cfg))

        def writes(self, x: Any) -> Any:
            self.cfg.step = x
            return x * self.cfg.k

    hook = Reads()
    for fn in (hook.pack, hook.pack_inside):
        found = read(fn)
        assert not found.may_change
        with changed(cfg, "step", 1), changed(cfg.inner, "step", 1):
            assert found.is_still(fn) and content(fn) == found.digest
        for holder, name in ((cfg, "k"), (cfg.inner, "k"), (hook, "cfg")):
            with changed(holder, name, types.SimpleNamespace(k=7, inner=cfg.inner) if name == "cfg" else 7):
                assert not found.is_still(fn) and content(fn) != found.digest
    for fn in (hook.all_of_it, hook.writes):
        found = read(fn)
        with changed(cfg, "step", 1):
            assert not found.is_still(fn) and content(fn) != found.digest


def test_what_a_logger_does_is_not_content() -> None:
    log = logging.getLogger("aot_hooks.tests.content")

    class Logs:
        def __init__(self) -> None:
            self.log = log

        def pack(self, x: Any) -> Any:
            self.log.debug("packs %s", x)
            return x

    def pack(x: Any) -> Any:
        log.debug("packs %s", x)
        logging.debug("packs %s", x)
        return x

    for hook in (pack, Logs().pack, log.debug):
        found = read(hook)
        assert not found.may_change
        handler = logging.NullHandler()
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        hook("x")
        try:
            assert found.is_still(hook) and content(hook) == found.digest
        finally:
            log.removeHandler(handler)
            log.setLevel(logging.NOTSET)
    assert content(log) != content(logging.getLogger("aot_hooks.tests.other"))
