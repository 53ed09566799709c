"""`plan` and `saved_tensors`: what compiling would decide, with nothing run and nothing left behind."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from steps import ATEN, HALF
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import aot_hooks
from aot_hooks import KEEP, checkpoint_name, errors, lossless, policies
from aot_hooks.passes.plan import joined
from aot_hooks.passes.results import RESULT
from aot_hooks.settings.byte_sizes import size_text


class Net(nn.Module):
    """Two graphs with an eager part between them; batch norms and dropout in all three."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.eager_norm, self.last_norm = nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.BatchNorm1d(8)

    @torch.compiler.disable
    def eager(self, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.eager_norm(h).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.norm(self.up(x)).tanh())
        h = self.eager(h)
        return self.last_norm(self.down(h).sigmoid()).tanh()


def entry_count(fn: Any) -> int:
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(fn.__code__))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_plan_is_what_compiling_decides(inner: str) -> None:
    model, x = mlp(), torch.randn(4, 8)
    plan = aot_hooks.plan(model, x, policy=HALF, inner=inner)
    compiled = torch.compile(model, backend="aot_hooks", options={"inner": inner, "policy": HALF})
    compiled(x).sum().backward()
    (decided,) = aot_hooks.last_plans(compiled)
    assert plan == decided
    assert any(d.hook is HALF for d in plan.decisions) and 0 < plan.packed_bytes < plan.saved_bytes


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(8, 16), nn.Linear(16, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint_name(self.up(x).sigmoid(), "gate")
        if self.breaks:
            torch._dynamo.graph_break()
        return x + nn.functional.dropout(self.down(h).relu()).sin()


class Blocks(nn.Module):
    """Layers with names and masks. If the middle one breaks, Dynamo leaves the loop around it to Python, and compiles
    each layer by itself."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(breaks and i == 1) for i in range(3)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.exp()).exp().square()


POLICIES = {
    "modules": policies.only_these_modules({"layers.1": HALF}),
    "names": policies.only_these_names({"gate": HALF}),
    "lossless": lossless(),
    "first": policies.first_match(policies.only_these_names({"gate": KEEP}), lossless(), HALF),
}


def without_numbers(plan: aot_hooks.Plan) -> Counter[aot_hooks.Decision]:
    """Torch 2.11 numbers the inputs of a graph by origin: closure variables, arguments."""
    inputs = {d.saved.name for d in plan.decisions if d.saved.is_input}
    rows = [replace(d.saved, storage=0, name="" if d.saved.name in inputs else d.saved.name) for d in plan.decisions]
    return Counter(replace(d, saved=row) for d, row in zip(plan.decisions, rows, strict=True))


CASES = [(*case, policy) for case in (("aten", "module", True), ("aten", "function", False)) for policy in POLICIES]


@pytest.mark.core
@pytest.mark.parametrize("inner, called_as, breaks, policy", CASES)
def test_policies_plan_what_they_compile(inner: str, policy: str, called_as: str, breaks: bool) -> None:
    model, x, rule = Blocks(breaks), torch.randn(4, 8), POLICIES[policy]
    fn = model if called_as == "module" else lambda x: model(x).sin()
    plan = aot_hooks.plan(fn, x, policy=rule, inner=inner)
    compiled = torch.compile(fn, backend="aot_hooks", options={"inner": inner, "policy": rule})
    compiled(x).sum().backward()
    plans = aot_hooks.last_plans(compiled)
    assert (len(plans) > 1) == breaks
    if called_as == "module":
        assert plan == joined(plans)
    else:
        assert without_numbers(plan) == without_numbers(joined(plans))

    packed = [d.saved for d in plan.decisions if d.hook not in (KEEP, RESULT)]
    places = {row.module_path.split(".up")[0].split(".down")[0] for row in packed}
    if policy == "modules":
        assert places == {"layers.1"}
    elif policy == "names":
        expected = {"layers.0", "layers.2"} if breaks else {"layers.0", "layers.1", "layers.2"}
        assert places == expected and all(row.checkpoint_names == ("gate",) for row in packed)
    elif policy == "lossless":
        assert len(packed) >= 3 and all(
            row.value_range or row.backward_asks or row.dtype is torch.bool for row in packed
        )
    else:
        assert packed and not any("gate" in row.checkpoint_names for row in packed)
        assert {d.hook.name for d in plan.decisions} >= {"keep", "half", "bitmask"}


def test_live_bytes_are_in_the_modules_that_policies_see() -> None:
    plan = aot_hooks.plan(Blocks(True), torch.randn(4, 8), policy=POLICIES["modules"], inner="aten")
    places = {p.module_path for p in (*plan.live_before, *plan.live_after)}
    assert {"layers.0.up", "layers.1.up", "layers.1.down", "layers.2.up"} <= places
    assert places <= {name for name, _ in Blocks(True).named_modules()}
    assert {p.source_line.split(":")[0] for p in plan.live_before} == {"test_dry_run.py"}  # not that of checkpoint_name


@pytest.mark.core
def test_nothing_is_changed() -> None:
    model, x = Net(), torch.randn(4, 8)
    model(x).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {k: p.grad for k, p in model.named_parameters()}
    values = {k: g.clone() for k, g in grads.items() if g is not None}
    random_state = torch.get_rng_state()
    plan = aot_hooks.plan(model, x, policy=HALF)
    assert sum(d.hook is HALF for d in plan.decisions) > 2
    for k, v in model.state_dict().items():
        torch.testing.assert_close(v, before[k], rtol=0, atol=0)
        assert type(v) is torch.Tensor
    for k, p in model.named_parameters():
        assert p.grad is grads[k]
        torch.testing.assert_close(p.grad, values[k], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)


class Remembers(nn.Module):
    """Assigns its results: a buffer, a mask that it makes once, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.mask: torch.Tensor | None = None
        self.call_count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(8, 8).tril()
        self.call_count += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return (self.up(x).sigmoid() @ self.mask).tanh()


@pytest.mark.core
@pytest.mark.parametrize("called_as", ["module", "method", "closure", "argument"])
def test_what_modules_assign_is_undone(called_as: str) -> None:
    model, x = Remembers(), torch.randn(4, 8)
    inside = nn.Sequential(model)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "module": (inside, (x,)),
        "method": (model.forward, (x,)),
        "closure": (lambda x: inside(x), (x,)),
        "argument": (lambda m, x: m[0](x), ([inside], x)),
    }
    fn, args = calls[called_as]
    mean = model.mean
    assert aot_hooks.plan(fn, *args, inner="aten").saved_bytes > 0
    assert model.mean is mean and model.mask is None and model.call_count == 0
    fn(*args)
    assert type(model.mean) is type(model.mask) is torch.Tensor and model.call_count == 1
    torch.testing.assert_close(model.mean, 0.5 + x.mean(0))


def test_no_kernel_runs() -> None:
    ran: list[str] = []

    class Watch(TorchDispatchMode):
        """A mode below the fake mode: it sees the operators that pass through that."""

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not any(t.__name__ == "FakeTensor" for t in types):
                ran.append(str(func))
            return func(*args, **(kwargs or {}))

    model, x = Net(), torch.randn(4, 8)
    with Watch():
        model(x)
        in_a_run = [op for op in ran if "mm" in op or "batch_norm" in op]
        ran.clear()
        aot_hooks.plan(model, x)
    assert in_a_run and not [op for op in ran if "mm" in op or "batch_norm" in op]


@pytest.mark.core
def test_nothing_compiled_is_left() -> None:
    model = Net()
    aot_hooks.plan(model, torch.randn(4, 8))
    assert entry_count(Net.forward) == 0
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    compiled(torch.randn(6, 8))  # another size: one that is remembered would make this one dynamic
    compiled(torch.randn(6, 8))
    assert counter.frame_count == 2


def test_no_plan_is_kept() -> None:
    kept = weakref.ref(
        aot_hooks.plan(lambda w: (w @ w).sin().sin(), torch.randn(4, 4, requires_grad=True), inner="aten")
    )
    gc.collect()
    assert kept() is None


def test_the_compiled_function_goes_on_as_it_was() -> None:
    model, x = mlp(), torch.randn(4, 8)
    counter = torch._dynamo.testing.CompileCounter()

    def f(x: torch.Tensor) -> torch.Tensor:
        return model(x).sin()

    compiled = torch.compile(f, backend=counter)
    compiled(x)
    assert aot_hooks.plan(f, x).saved_bytes == aot_hooks.plan(compiled, x).saved_bytes > 0
    compiled(x)
    assert counter.frame_count == 1


def test_planning_often_does_not_use_up_recompilations() -> None:
    model, x = mlp(), torch.randn(4, 8)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    compiled(x)
    sizes = {aot_hooks.plan(model, torch.randn(4 + i, 8)).saved_bytes for i in range(10)}
    assert len(sizes) == 10 and 0 not in sizes
    compiled(x)
    assert counter.frame_count == 1
    compiled(x.double().float()[:2])
    assert counter.frame_count == 2


def _as_it_is(f: Any) -> Any:
    """A decorator, as those around the forwards of transformers."""

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return wrapper


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    @_as_it_is
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(nn.functional.gelu(self.up(x)))
        torch._dynamo.graph_break()
        return h.tanh()


def test_planning_often_does_not_use_up_recompilations_of_code_without_a_graph() -> None:
    """Dynamo compiles the decorator too, without a graph of its own."""
    model, x = Wrapped(), torch.randn(16, 8)
    found = {aot_hooks.plan(model, x, policy=HALF, inner="aten").packed_bytes for _ in range(12)}
    assert len(found) == 1 and 0 not in found
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": HALF})
    compiled(x).sum().backward()
    assert sum(plan.packed_bytes for plan in aot_hooks.last_plans(compiled)) in found


def test_what_cannot_be_compiled_does_not_keep_others_from_it() -> None:
    """Dynamo skips the frame that calls an LSTM, and would skip it for every other module."""
    assert aot_hooks.plan(nn.LSTM(8, 8), torch.randn(5, 2, 8)).decisions == ()
    assert aot_hooks.plan(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)).saved_bytes > 0


@pytest.mark.core
def test_graphs_come_in_order_and_storages_are_numbered_through() -> None:
    rows = aot_hooks.saved_tensors(Net(), torch.randn(4, 8))
    made = [r for r in rows if r.op == "aten.addmm.default"]
    assert [r.shape for r in made] == [(4, 16), (4, 8)]
    second = rows.index(made[1])
    assert max(r.storage for r in rows[:second] if r.module_path == "up") < made[1].storage
    assert len({r.storage for r in rows}) == len(rows)


def test_rows_say_what_is_saved() -> None:
    row = next(r for r in aot_hooks.saved_tensors(mlp(), torch.randn(4, 8)) if "addmm" in r.op)
    assert (row.shape, row.dtype, row.nbytes, row.module_path) == ((4, 8), torch.float32, 128, "0")
    assert any("batch_norm_backward" in op for op in row.backward_ops)

    def viewed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = (x @ w).view(2, 2, 8).transpose(0, 1).chunk(2, -1)
        return torch.sigmoid(a) * b

    (row,) = (
        r
        for r in aot_hooks.saved_tensors(viewed, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
        if r.op == "aten.mm.default"
    )
    assert "aten.mul.Tensor" in row.backward_ops and not any("view" in op or "split" in op for op in row.backward_ops)

    # torch computes it in Python, in lines of its own
    norm = torch.nn.RMSNorm(8)
    rows = aot_hooks.saved_tensors(lambda x: norm(x.sin()), torch.randn(4, 8))
    assert rows and all("test_dry_run.py" in r.source_line for r in rows)

    def f(w: torch.Tensor) -> torch.Tensor:
        return w.sin().exp()

    rows = aot_hooks.saved_tensors(f, torch.randn(4, requires_grad=True))
    assert any("w.sin().exp()" in r.source_line and "test_dry_run.py" in r.source_line for r in rows)


def test_the_surrounding_context_wins() -> None:
    model, x = mlp(), torch.randn(4, 8)
    with aot_hooks.saved_tensors_hooks(HALF):
        plan = aot_hooks.plan(model, x, policy=KEEP)
    assert any(d.hook is HALF for d in plan.decisions)
    assert not any(d.hook is HALF for d in aot_hooks.plan(model, x, policy=KEEP).decisions)
    assert {d.reason for d in aot_hooks.plan(model, x).decisions if d.saved_bytes} == {"no hook covers it"}


def test_options_of_a_compiled_function_hold() -> None:
    model, x = mlp(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": HALF, "scope": "all"})
    plan = aot_hooks.plan(compiled, x)
    assert any(d.hook is HALF and d.saved.is_input for d in plan.decisions)
    scoped = aot_hooks.plan(compiled, x, scope="donated")
    assert not any(d.hook is HALF and d.saved.is_input for d in scoped.decisions)


@pytest.mark.core
def test_fake_models_are_planned() -> None:
    """A model that this machine could not hold: 64 GiB of weights."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 17, bias=False), nn.Tanh(), nn.Linear(1 << 17, 1 << 16))
        plan = aot_hooks.plan(model, torch.randn(1 << 14, 1 << 16), policy=HALF)
    assert plan.saved_bytes == (1 << 14) * (1 << 17) * 4
    assert plan.packed_bytes == plan.saved_bytes // 2


def _branch(h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda h: (h @ h).sin(), lambda h: (h * h).cos(), (h,))


def _loop(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        start = torch.tensor(0), h.detach().cos()
        _, k = torch._higher_order_ops.while_loop(lambda i, k: i < 3, lambda i, k: (i + 1, k.sin()), start)
    return k.cos() * h


@pytest.mark.core
@pytest.mark.parametrize("control_flow", [_branch, _loop])
def test_control_flow_on_tensors_is_planned(control_flow: Any) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = control_flow(torch.tanh(x @ w))
        torch._dynamo.graph_break()
        return torch.tanh(h @ w)

    plan = aot_hooks.plan(f, x, policy=HALF, inner="aten")
    assert torch.is_grad_enabled()
    compiled = torch.compile(f, backend="aot_hooks", options=ATEN | {"policy": HALF})
    compiled(x).sum().backward()
    assert plan == joined(aot_hooks.last_plans(compiled))


def test_a_value_that_is_read_between_graphs_is_an_error() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        torch._dynamo.graph_break()
        if h.sum().item() > 0:
            h = h.cos()
        return h.exp()

    with pytest.raises(errors.UnsupportedGraphError, match=r"move what reads it .* or compile and run it"):
        aot_hooks.plan(f, torch.randn(4, requires_grad=True))


def test_graphs_that_together_are_over_a_budget_are_a_warning() -> None:
    model, x = nn.ModuleList(Block(False) for _ in range(2)), torch.randn(256, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    stock = aot_hooks.plan(f, x, policy=KEEP, inner="aten").peak_bytes
    tight, loose = (aot_hooks.budget(f"{int(share * stock)}B", max_error=0) for share in (0.9, 1.0))
    with pytest.warns(errors.BudgetWarning, match="its 2 graphs are planned one by one here") as warned:
        plan = aot_hooks.plan(f, x, policy=tight, inner="aten")
    assert plan.peak_bytes > tight.peak and len(warned) == 1 and warned[0].filename == __file__
    text = str(warned[0].message)
    assert f"under {size_text(tight.peak)}" in text and f"take {size_text(plan.peak_bytes)} together" in text
    assert "In training a budget plans them as one step" in text and "last_plans" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.BudgetWarning)
        assert aot_hooks.plan(f, x, policy=loose, inner="aten").peak_bytes <= loose.peak
        aot_hooks.frontier(f, x, inner="aten", max_error=0, allow=["recompute"])
    compiled = torch.compile(f, backend="aot_hooks", options=ATEN | {"policy": tight})
    with pytest.warns(errors.BudgetWarning, match="planned one by one"):
        aot_hooks.plan(compiled, x)


def test_stepping_an_optimizer_is_refused() -> None:
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [p.detach().clone() for p in model.parameters()]

    def train() -> None:
        model(x).square().sum().backward()
        optimizer.step()

    with pytest.raises(errors.OptionError, match="steps an optimizer"):
        aot_hooks.plan(train)
    assert all(map(torch.equal, weights, (p.detach() for p in model.parameters())))
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "kwargs, message",
    [({"scope": "some"}, "scope"), ({"inner": "none"}, "inner"), ({"policy": 3}, "policy")],
)
def test_wrong_options_are_named(kwargs: Any, message: str) -> None:
    with pytest.raises(errors.OptionError, match=message):
        aot_hooks.plan(mlp(), torch.randn(4, 8), **kwargs)


@pytest.mark.core
def test_meta_tensors_are_refused() -> None:
    """torch would trace `empty_strided` in place of their operators."""
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for arguments in ((model, x), (lambda x: x.sin(), x.requires_grad_()), (model, torch.randn(2, 4))):
        with pytest.raises(errors.OptionError, match=r"got some of device 'meta'.* under FakeTensorMode"):
            aot_hooks.plan(*arguments)


def test_a_bad_hook_is_named_by_its_own_error() -> None:
    bad = aot_hooks.Hook("bad", lambda x: x.half(), lambda p: p)
    with pytest.raises(errors.HookContractError, match="hook 'bad' on saved 'addmm'"):
        aot_hooks.plan(mlp(), torch.randn(4, 8), policy=bad)


def test_without_gradients_there_is_nothing_to_plan() -> None:
    with torch.no_grad(), pytest.warns(errors.UnusedWarning, match="gradients are disabled"):
        assert aot_hooks.plan(mlp(), torch.randn(4, 8)).decisions == ()


def test_pythons_random_numbers_go_on_as_if_nothing_was_planned():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return (x @ w).sin() * (2.0 if random.random() < 0.5 else 3.0)

    random.seed(3)
    expected = random.random()
    random.seed(3)
    aot_hooks.plan(f, torch.randn(3, 4), torch.randn(4, 4, requires_grad=True))
    assert random.random() == expected
