"""lossless() in graphs: gradients equal to the last bit, in fewer bytes."""

from __future__ import annotations

import pytest
import torch
from comparisons import CALLS, decided, numbers, results, what_is_asked
from graphs import by_hand, ops
from steps import assert_same, step
from torch._subclasses.fake_tensor import FakeTensorMode

import aot_hooks
from aot_hooks import KEEP, lossless
from aot_hooks.graphs.read_tables import ONLY_TESTS, Test
from aot_hooks.hook import compiling_for
from aot_hooks.library.lossless import compare_hook
from aot_hooks.passes.trace import trace_hook

aten = torch.ops.aten


class Net(torch.nn.Module):
    """All kinds: ReLU and pooling before and after a convolution, dropout, ReLU6, leaky ReLU, argmax, an average."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Hardsigmoid(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 16),
            nn.LeakyReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 10),
        )
        self.to(dtype)

    def forward(self, x):
        h = self.body(x)
        top, _ = h.topk(3, dim=1)
        return h.abs().sum() + top.square().sum() + torch.nn.functional.hardtanh(h, -0.5, 0.5).sum()


def small() -> torch.nn.Module:
    """Few layers, where compiling takes long."""
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, 1),
        nn.Flatten(0),
    )


def train(net, inner, policy, batches, steps_count=3, dynamic=False):
    """Losses, gradients of each step, and the plans; SGD between the steps, dropout under one seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"inner": inner} | ({"policy": policy} if policy is not None else {})
    compiled = torch.compile(net, backend="aot_hooks", options=options, dynamic=dynamic)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found = []
    for i in range(steps_count):
        x = batches[i % len(batches)].clone().requires_grad_()
        torch.manual_seed(100 + i)
        loss = compiled(x).sum()
        loss.backward()
        found.append((loss.detach(), x.grad, [p.grad.clone() for p in net.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return found, aot_hooks.last_plans(compiled)


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return Net(dtype)


def batches(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, 3, 16, 16, generator=generator).to(dtype) for n in sizes]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_network_trains_bitwise_the_same_in_fewer_bytes(dtype):
    expected, _ = train(net(dtype), "aten", None, batches(4, dtype=dtype))
    got, (plan,) = train(net(dtype), "aten", lossless(), batches(4, dtype=dtype))
    assert_same(got, expected)
    assert not torch.equal(expected[0][0], expected[1][0])  # the steps differ
    by_hook = {d.hook.name for d in plan.decisions}
    assert {"bitmask", "shape_only", "compare(le 0)", "compare(gt 0)", "compare(inside -3 3)"} <= by_hook
    assert {"compare(isnan, outside 0 6)", "narrow(uint8)", "narrow(4 bits)"} <= by_hook
    for d in plan.decisions:
        assert (d.packed_bytes < d.saved_bytes) if d.hook is not KEEP else d.packed_bytes == d.saved_bytes, d
        assert d.hook is not KEEP or d.reason
    assert plan.packed_bytes < 0.7 * plan.saved_bytes


@pytest.mark.core
def test_a_dynamic_batch_trains_bitwise_the_same():
    expected, _ = train(small(), "aten", None, batches(4, 3, 7), dynamic=True)
    got, (plan,) = train(small(), "aten", lossless(), batches(4, 3, 7), dynamic=True)
    assert_same(got, expected)
    assert plan.packed_bytes < 0.8 * plan.saved_bytes
    assert any(type(s).__name__ == "Dim" for d in plan.decisions if d.hook is not KEEP for s in d.saved.shape)


@pytest.mark.slow
def test_inductor_trains_bitwise_the_same():
    expected, _ = train(small(), "inductor", None, batches(4))
    got, (plan,) = train(small(), "inductor", lossless(), batches(4))
    assert_same(got, expected)
    assert {"bitmask", "narrow(2 bits)", "shape_only"} <= {d.hook.name for d in plan.decisions}
    taken = [d for d in plan.decisions if d.hook is not KEEP]
    assert sum(d.packed_bytes for d in taken) < 0.1 * sum(d.saved_bytes for d in taken)
    assert plan.saved_bytes - plan.packed_bytes == sum(d.saved_bytes - d.packed_bytes for d in taken)


def largest_of_columns(x, w):
    values, index = (x @ w).max(0)
    return values * x[:, :1].expand(x.shape[0], w.shape[1]).gather(0, index.unsqueeze(0)).squeeze(0)


def index_hook(fn, sizes):
    """The hook for the indices of a maximum over a symbolic size, once gradients agree for `sizes`; one graph."""
    compiled = torch.compile(fn, backend="aot_hooks", dynamic=True, options={"inner": "aten", "policy": lossless()})
    plain = torch.compile(fn, backend="aot_hooks", dynamic=True, options={"inner": "aten"})
    for n in sizes:
        x, w = torch.randn(n, 4, requires_grad=True), torch.randn(4, 60, requires_grad=True)
        assert_same(step(compiled, x, w), step(plain, x, w))
    (plan,) = aot_hooks.last_plans(compiled)
    (index,) = (d for d in plan.decisions if d.saved.dtype is torch.int64)
    return index


@pytest.mark.core
def test_an_index_into_any_size_stays():
    """A symbolic size without a bound: nothing is narrowed by its value of today, nothing compiled again."""
    index = index_hook(largest_of_columns, (5, 300, 70000))
    assert index.hook is KEEP and index.reason == "lossless: the graph does not prove a smaller range"


@pytest.mark.core
def test_a_bound_on_a_symbolic_size_is_used_and_holds():
    def bounded(x, w):
        torch._check(x.shape[0] <= 300)
        return largest_of_columns(x, w)

    assert index_hook(bounded, (5, 300, 257)).hook.name == "narrow(int16)"


def plan_of(forward, backward, *inputs, policy=None):
    pair = by_hand(forward, backward, *inputs)
    before = pair.copy()
    after = pair.apply(lossless() if policy is None else policy)
    x = [torch.randn_like(i) if i.is_floating_point() else i for i in inputs]
    assert_same(after.run(*x), before.run(*x))
    return after.plan


OTHER_READERS = {
    "a product": lambda h, t: (t * h,),
    "a convolution": lambda h, t: ((h <= 0) * t, aten.convolution(h, h, None, [1], [0], [1], False, [0], 1)),
    "a product through a transpose": lambda h, t: ((h <= 0) * t, h.transpose(0, 1) @ t.transpose(0, 1)),
    "a sum": lambda h, t: ((h <= 0) * t + h.sum(),),
    "given back": lambda h, t: ((h <= 0) * t, h.view(-1)),
}


@pytest.mark.core
@pytest.mark.parametrize("backward", OTHER_READERS.values(), ids=OTHER_READERS)
def test_a_tensor_with_any_other_reader_stays(backward):
    plan = plan_of(lambda x: (x.exp(), x.relu()), backward, torch.randn(6, 6, 6))
    assert [d.hook for d in plan.decisions] == [KEEP]
    assert plan.packed_bytes == plan.saved_bytes


@pytest.mark.core
def test_relu_before_a_convolution_stays_and_before_pooling_does_not():
    conv = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.ReLU(), torch.nn.Conv1d(4, 4, 3))
    pool = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool1d(2))
    hooks = []
    for model in (conv, pool):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": lossless()})
        x = torch.randn(2, 4, 16, requires_grad=True)
        assert_same(step(compiled, x), step(model, x))
        (plan,) = aot_hooks.last_plans(compiled)
        (relu,) = {d.hook.name for d in plan.decisions if d.saved.op == "aten.relu.default"}
        hooks.append(relu)
    assert hooks == ["keep", "compare(le 0)"]


@pytest.mark.core
def test_views_of_one_storage_are_packed_once_for_all_their_questions():
    def forward(x):
        h = x.sin()
        return x.exp(), h, h.view(-1)

    plan = plan_of(forward, lambda h, v, t: ((h <= 0) * t, (v < 0.5) * t.view(-1)), torch.randn(8, 8))
    assert [d.hook.name for d in plan.decisions] == ["compare(le 0, lt 0.5)"] * 2
    assert plan.saved_bytes == 256 and plan.packed_bytes == 2 * 8
    plan = plan_of(forward, lambda h, v, t: ((h <= 0) * t, v * t.view(-1)), torch.randn(8, 8))
    assert [d.hook for d in plan.decisions] == [KEEP] * 2


@pytest.mark.core
def test_equal_copies_are_packed_once():
    def forward(x):
        mask = x > 0
        return x.exp(), mask, mask.t().contiguous(), mask.unsqueeze(0).expand(3, 8, 16).contiguous()

    def backward(m, transposed, repeated, t):
        return m * t, transposed * t.t(), repeated * t

    plan = plan_of(forward, backward, torch.randn(8, 16))
    assert [d.hook.name for d in plan.decisions] == ["bitmask"] * 3
    assert [d.packed_bytes for d in plan.decisions] == [16, 0, 0]
    assert plan.saved_bytes == 5 * 128

    def relu(x):
        h = x.relu()
        return x.exp(), h, h.t().contiguous()

    plan = plan_of(relu, lambda h, c, t: ((h <= 0) * t, (c <= 0) * t.t()), torch.randn(8, 16))
    assert [d.packed_bytes for d in plan.decisions] == [16, 0]
    # another comparison has a packing of its own, because neither answers the other
    plan = plan_of(relu, lambda h, c, t: ((h <= 0) * t, (c < 0.5) * t.t()), torch.randn(8, 16))
    assert [d.packed_bytes for d in plan.decisions] == [16, 16]


@pytest.mark.core
def test_a_copy_of_something_small_is_packed_before_it_was_copied():
    plan = plan_of(
        lambda x: (x.exp(), x.relu().unsqueeze(0).expand(50, 2, 3).contiguous()),
        lambda h, t: ((h <= 0) * t,),
        torch.randn(2, 3),
    )
    (d,) = plan.decisions
    assert d.saved_bytes == 1200 and d.packed_bytes == 1


@pytest.mark.core
def test_nothing_crosses_for_a_shape_and_symbolic_sizes_do():
    def f(x):
        return torch.nn.functional.avg_pool2d(x.sin(), 2)

    compiled = torch.compile(f, backend="aot_hooks", dynamic=True, options={"inner": "aten", "policy": lossless()})
    for size in ((2, 3, 8, 6), (5, 4, 10, 12)):
        x = torch.randn(size, requires_grad=True)
        assert_same(step(compiled, x), step(f, x))
        x = torch.randn(size).to(memory_format=torch.channels_last).requires_grad_()
        assert_same(step(compiled, x), step(f, x))
    for plan in aot_hooks.last_plans(compiled):
        (d,) = (d for d in plan.decisions if d.hook is not KEEP)
        assert d.hook.name == "shape_only" and d.packed_bytes == 0


@pytest.mark.core
@pytest.mark.parametrize("how", ["policy", "context", "region"])
def test_ways_to_ask_for_it(how):
    def f(x):
        return torch.nn.functional.dropout(x.sin().relu().cumsum(0), 0.5)

    def inside(x):
        with aot_hooks.saved_tensors_policy(lossless()):
            return f(x)

    options = {"inner": "aten"} | ({"policy": lossless()} if how == "policy" else {})
    compiled = torch.compile(inside if how == "region" else f, backend="aot_hooks", options=options)
    plain = torch.compile(f, backend="aot_hooks", options={"inner": "aten"})
    x = torch.randn(16, 8)

    def run(fn, with_context=False):
        torch.manual_seed(3)
        y = x.clone().requires_grad_()
        if with_context:
            with aot_hooks.saved_tensors_policy(lossless()):
                out = fn(y)
        else:
            out = fn(y)
        out.square().sum().backward()
        return y.grad

    assert torch.equal(run(compiled, how == "context"), run(plain))
    (plan,) = aot_hooks.last_plans(compiled)
    assert {"bitmask", "compare(le 0)"} <= {d.hook.name for d in plan.decisions}


@pytest.mark.core
def test_eager_parts_pack_only_what_the_dtype_tells():
    x = torch.randn(16, 8, requires_grad=True)
    mask = torch.rand(16, 8) > 0.5

    def f(x, mask):
        return torch.where(mask, x.sin().relu(), 0.0).sum()

    f(x, mask).backward()
    expected, x.grad = x.grad, None
    packed = []

    def watched(saved):
        hook = lossless()(saved)
        packed.append((saved.dtype, hook.name))
        return hook

    with aot_hooks.saved_tensors_policy(watched, scope="all"):
        loss = f(x, mask)
    loss.backward()
    assert torch.equal(x.grad, expected)
    assert dict(packed) == {torch.bool: "bitmask", torch.float32: "keep"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_for_inductor_the_rounded_number_is_compared(dtype):
    """The stored bits are of the rounded number: 1e-9 is 0 in float16.

    Inductor gives a fused reader the float32 number, but the backward reads the rounded one.
    """
    mode = FakeTensorMode()
    value = mode.from_tensor(torch.randn(4, 6, dtype=dtype))
    hook = compare_hook((Test("le", (0.0,)),), dtype)
    found = {}
    for compiler in ("aten", "inductor"):
        with compiling_for(compiler):
            found[compiler] = ops(trace_hook(hook, value, "'h'", decompositions=None).pack).count("aten.view.dtype")
    assert found == {"aten": 0, "inductor": 0 if dtype is torch.float32 else 2}


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_cuda_trains_the_same(inner):
    """Bitwise where the kernels are the same.

    Around packed values Inductor fuses differently, and a sum in another order rounds differently, although every saved
    value comes back exactly.
    """
    x = [b.cuda() for b in batches(4)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, _ = train(net().cuda(), inner, None, x)
        got, (plan,) = train(net().cuda(), inner, lossless(), x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(got, expected, exactly=inner == "aten")
    assert plan.packed_bytes < 0.9 * plan.saved_bytes


@pytest.mark.gpu
def test_cuda_kernels_ask_the_same():
    """The tables of graphs/read_tables.py hold for CUDA's kernels too: every operator, bit by bit."""
    for name in ONLY_TESTS:
        for constants in CALLS[name]:
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                x = numbers(dtype).cuda()
                answers = [t(x) for t in what_is_asked(name, constants)]
                assert decided(x, results(name, x, constants), answers, name, constants), (name, constants, dtype)
