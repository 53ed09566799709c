"""The key: equal exactly for equal programs, whatever anything is called; and names taken away leave no trace."""

from __future__ import annotations

import contextlib
import operator
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import aot_hooks
from aot_hooks import policies
from aot_hooks.cache import key as cache_key
from aot_hooks.cache.key import PACKAGE_DIGEST, Key, key_of, without_names
from aot_hooks.context import region as region_module
from aot_hooks.settings.setting import Setting
from cudagraph.torch_private.autograd_cache import sources_digest

pytestmark = pytest.mark.core


def graph_of(fn: Any, *args: Any, dynamic: bool | None = None) -> tuple[torch.fx.GraphModule, list[Any]]:
    """What Dynamo hands a backend for `fn(*args)`."""
    found = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    (only,) = found
    return only


def key(fn: Any, *args: Any, rule: Any = None, scope: str = "donated", dynamic: bool | None = None, **said: Any) -> Key:
    """The key of `fn(*args)` under `rule`."""
    gm, inputs = graph_of(fn, *args, dynamic=dynamic)
    ambient = None if rule is None else Setting(rule, scope)
    regions = {key: region.setting.in_scope("donated") for key, region in region_module.regions.items()}
    return key_of(gm, inputs, ambient, regions, **said)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        return self.down(h).tanh()


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(tokens))

        return self.second(hidden).tanh()


def hook(gain: float = 1.0, name: str = "half", **said: Any) -> aot_hooks.Hook:
    return aot_hooks.Hook(name, lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1]) * gain, **said)


X = torch.randn(3, 4)


# --- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [hook(), aot_hooks.float8(), policies.larger_than(64, hook()), aot_hooks.lossless()])
def test_names_are_no_part_of_it(rule: Any) -> None:
    assert key(Mlp(), X, rule=rule).lines == key(Renamed(), X, rule=rule).lines


def test_hooks_made_anew_and_called_otherwise_are_the_same() -> None:
    def pack(tensor: torch.Tensor) -> Any:
        return tensor.half()

    def other(x: torch.Tensor) -> Any:
        return x.half()

    def unpack(p: Any) -> torch.Tensor:
        return p.float()

    a, b = aot_hooks.Hook("a", pack, unpack), aot_hooks.Hook("b", other, unpack)
    assert key(Mlp(), X, rule=a).digest == key(Mlp(), X, rule=b).digest


def test_names_of_inner_graphs_are_no_part_of_it() -> None:
    def checkpointed(model: nn.Module) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(model, x.sin(), use_reentrant=False)

    assert key(checkpointed(Mlp()), X).digest == key(checkpointed(Renamed()), X).digest


def test_symbolic_sizes_go_by_where_they_come_from() -> None:
    """torch calls a symbol after the argument that it is a size of."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = y.mT.reshape(-1)[: x.numel()]
        return x.sin() * x.shape[0] + flat.view_as(x).cos() * y.shape[1]

    def renamed(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        part = mask.mT.reshape(-1)[: tokens.numel()]
        return tokens.sin() * tokens.shape[0] + part.view_as(tokens).cos() * mask.shape[1]

    def other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = y.mT.reshape(-1)[: x.numel()]
        return x.sin() * x.shape[1] + flat.view_as(x).cos() * y.shape[1]

    x, y = torch.randn(3, 4), torch.randn(5, 7)
    key_of_f = key(f, x, y, dynamic=True)
    key_of_renamed = key(renamed, x, y, dynamic=True)
    assert key_of_f.sizes != key_of_renamed.sizes and len(key_of_f.sizes) == 4
    assert key_of_f.lines == key_of_renamed.lines
    assert key(f, torch.randn(5, 6), torch.randn(8, 7), dynamic=True).digest == key_of_f.digest
    assert key(other, x, y, dynamic=True).digest != key_of_f.digest
    assert key(f, torch.randn(3, 3), y, dynamic=True).digest != key_of_f.digest  # the same symbol twice


# --- different --------------------------------------------------------------------------------------------------------


def region(gain: float, early: bool) -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        with aot_hooks.saved_tensors_hooks(hook(gain)) if early else contextlib.nullcontext():
            x = x.sin()
        with contextlib.nullcontext() if early else aot_hooks.saved_tensors_hooks(hook(gain)):
            return x.cos()

    return f


def named(name: str) -> Any:
    return lambda x: aot_hooks.checkpoint_name(x.sin(), name).cos()


NARROW = torch.randn(2, 4)
DIFFERENT: list[tuple[str, Any]] = [
    ("nothing", lambda: key(Mlp(), X)),
    ("hook", lambda: key(Mlp(), X, rule=hook())),
    ("constant", lambda: key(Mlp(), X, rule=hook(2.0))),
    ("scope", lambda: key(Mlp(), X, rule=hook(), scope="all")),
    ("lossy", lambda: key(Mlp(), X, rule=hook(lossy=True))),
    ("declines", lambda: key(Mlp(), X, rule=hook(declines=lambda row: "no" if row.nbytes > 9 else None))),
    ("cache_hash", lambda: key(Mlp(), X, rule=hook(cache_hash="1"))),
    ("other cache_hash", lambda: key(Mlp(), X, rule=hook(cache_hash="2"))),
    ("policy", lambda: key(Mlp(), X, rule=policies.larger_than(64, hook()))),
    ("policy's number", lambda: key(Mlp(), X, rule=policies.larger_than(65, hook()))),
    ("modules", lambda: key(Mlp(), X, rule=policies.only_these_modules({"up": hook()}))),
    ("modules, renamed", lambda: key(Renamed(), X, rule=policies.only_these_modules({"up": hook()}))),
    ("function", lambda: key(Mlp(), X, rule=lambda row: hook())),
    ("function, other lines", lambda: key(Renamed(), X, rule=lambda row: hook())),
    ("library hook", lambda: key(Mlp(), X, rule=aot_hooks.float8())),
    ("library hook, argument", lambda: key(Mlp(), X, rule=aot_hooks.float8(scaling="blockwise"))),
    ("shape", lambda: key(Mlp(), NARROW, rule=hook())),
    ("dynamic", lambda: key(Mlp(), X, rule=hook(), dynamic=True)),
    ("requires_grad", lambda: key(Mlp(), X.clone().requires_grad_(), rule=hook())),
    ("dtype", lambda: key(Mlp().double(), X.double(), rule=hook())),
    ("option", lambda: key(Mlp(), X, rule=hook(), options={"mode": "max-autotune"})),
    ("region", lambda: key(region(1.0, True), X)),
    ("region elsewhere", lambda: key(region(1.0, False), X)),
    ("region's hook", lambda: key(region(2.0, True), X)),
    ("name", lambda: key(named("a"), X)),
    ("other name", lambda: key(named("b"), X)),
    ("model's constant", lambda: key(lambda x: x.sin() * 2, X)),
    ("other constant", lambda: key(lambda x: x.sin() * 3, X)),
    ("constant's type", lambda: key(lambda x: x.sin() * 2.0, X)),
    ("shared memory", lambda: key(operator.add, *[torch.ones(8)[:4], torch.ones(8)[4:]])),
    ("not shared", lambda: key(operator.add, *torch.ones(8).split(4))),
]


def test_what_changes_the_result_changes_the_key() -> None:
    digests = {what: make().digest for what, make in DIFFERENT}
    again = {what: make().digest for what, make in DIFFERENT}
    assert digests == again
    same = [(a, b) for a in digests for b in digests if a < b and digests[a] == digests[b]]
    assert same == []


def test_sources_count_as_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(torch.relu, X)
    assert sources_digest(*cache_key._FOLDERS) in PACKAGE_DIGEST

    def edited(path: pathlib.Path) -> bytes:
        return b"pass"

    monkeypatch.setattr(pathlib.Path, "read_bytes", edited)
    assert sources_digest(*cache_key._FOLDERS) not in PACKAGE_DIGEST
    assert key_of(*graph, None, {}).lines[0] == ("aot_hooks", PACKAGE_DIGEST)


# --- random programs: equal exactly when the programs are -------------------------------------------------------------

OPERATORS = (torch.add, torch.mul, torch.sub)
NAMES = st.lists(st.text("abcdxyz_", min_size=2, max_size=4), min_size=8, max_size=8, unique=True)

programs = st.fixed_dictionaries(
    {
        "shapes": st.lists(st.sampled_from([(2, 3), (3, 2), (2, 2)]), min_size=1, max_size=2),
        "steps": st.lists(
            st.tuples(
                st.integers(0, 2), st.integers(0, 3), st.sampled_from([1, 2, 2.0, None]), st.sampled_from([0, 0, 1, 2])
            ),
            min_size=1,
            max_size=3,
        ),
        "gain": st.sampled_from([1.0, 2.0, 2, None]),
        "gains": st.tuples(st.sampled_from([1.0, 3.0]), st.sampled_from([1.0, 3.0])),
        "scope": st.sampled_from(["donated", "all"]),
        "nbytes": st.sampled_from([None, 1, 2]),
    }
)


def canonical(program: dict[str, Any]) -> Any:
    """What a program is: all of it, regions by the settings in force and not by their numbers."""
    settings_of = {0: None, **{i + 1: gain for i, gain in enumerate(program["gains"])}}
    steps = []
    for i, (op, operand, constant, where) in enumerate(program["steps"]):
        known = len(program["shapes"]) + i
        other = (type(constant), constant) if constant is not None else operand // 2 % known
        steps.append((op, operand % known, other, settings_of[where]))
    gain, gains = program["gain"], program["nbytes"] if program["gain"] is not None else None
    return program["shapes"], steps, (type(gain), gain), gains, program["scope"] if gain is not None else None


def build(program: dict[str, Any], names: list[str]) -> Key:
    """The program as Dynamo would trace it, with `names` for its arguments and values."""
    graph = torch.fx.Graph()
    values = []
    name = iter(names)
    for _ in program["shapes"]:
        values.append(graph.placeholder(next(name)))
    made = [Setting(hook(gain)) for gain in program["gains"]]
    for op, operand, constant, where in program["steps"]:
        known = len(values)
        other = constant if constant is not None else values[operand // 2 % known]
        node = graph.create_node("call_function", OPERATORS[op], (values[operand % known], other), name=next(name))
        if where:
            node.meta["custom"] = {"aot_hooks": made[where - 1].key}
        values.append(node)
    graph.output((values[-1],))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    ambient = None
    if program["gain"] is not None:
        rule: Any = hook(program["gain"], name=next(name))
        rule = rule if program["nbytes"] is None else policies.larger_than(program["nbytes"], rule)
        ambient = Setting(rule, program["scope"])
    inputs = [torch.empty(shape) for shape in program["shapes"]]
    return key_of(gm, inputs, ambient, {setting.key: setting for setting in made})


@settings(max_examples=120, deadline=None)
@given(programs, programs, st.booleans(), NAMES, NAMES)
def test_keys_are_equal_exactly_when_the_programs_are(
    a: dict[str, Any], b: dict[str, Any], same: bool, names_a: list[str], names_b: list[str]
) -> None:
    b = a if same else b
    assert (build(a, names_a).digest == build(b, names_b).digest) == (canonical(a) == canonical(b))


@settings(max_examples=60, deadline=None)
@given(programs, st.data())
def test_one_change_of_a_program_is_another_key(a: dict[str, Any], data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(sorted(a)))
    b = {**a, part: data.draw(programs)[part]}
    assert (build(a, list("abcdefgh")).digest == build(b, list("stuvwxyz")).digest) == (canonical(a) == canonical(b))


# --- names taken away, and given back ---------------------------------------------------------------------------------


def everything(gm: torch.fx.GraphModule) -> Any:
    """All that carries a name in `gm` and the graphs in it."""
    graphs = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
    return [
        (
            [(id(n), n.name, n.target) for n in g.graph.nodes],
            [id(n) for n in g.graph.find_nodes(op="placeholder", sort=False)],
            id(g.graph._graph_namespace),
            set(g.graph._graph_namespace._used_names),
            dict(g.graph._graph_namespace._base_count),
            {id(n): name for n, name in g.graph._graph_namespace._obj_to_name.items()},
            g.code,
            sorted(vars(g)),
        )
        for g in graphs
    ]


def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    return torch.utils.checkpoint.checkpoint(lambda a, b: (a @ b).sin() * b.sum(), doubled, y, use_reentrant=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_copy_without_names_leaves_the_graph_alone(dynamic: bool) -> None:
    gm, _ = graph_of(inner, torch.randn(3, 4), torch.randn(4, 5), dynamic=dynamic)
    assert len([m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]) == 2
    before = everything(gm)
    copied = without_names(gm)
    codes = [m.code for m in copied.modules() if isinstance(m, torch.fx.GraphModule)]
    assert len(codes) == 2 and not any("doubled" in code or "l_x_" in code for code in codes)
    assert [n.name for n in copied.graph.nodes] == [f"n_{i}" for i in range(len(gm.graph.nodes))]
    assert vars(copied).keys() == vars(gm).keys() - {"_source_to_user_stacks"}
    copied.graph.lint()
    assert everything(gm) == before


def test_a_copy_without_names_computes_the_same() -> None:
    gm, inputs = graph_of(inner, torch.randn(3, 4), torch.randn(4, 5))
    real = [torch.randn(i.shape) for i in inputs]
    torch.testing.assert_close(without_names(gm)(*real), gm(*real), rtol=0, atol=0)


def test_a_key_leaves_the_graph_alone() -> None:
    gm, inputs = graph_of(inner, torch.randn(3, 4), torch.randn(4, 5), dynamic=True)
    before = everything(gm)
    key_of(gm, inputs, Setting(hook()), {})
    assert everything(gm) == before
