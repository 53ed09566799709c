"""Kernels return strides that torch's fake kernels did not predict: hooks give back what really came.

`DIFFERING` lists operators of `op_db` that do so on a CPU. Each makes a tensor of which two views are saved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import layouts
import pytest
import torch
from graphs import Pair, by_hand
from layouts import Case
from torch.utils import _pytree as pytree

import aot_hooks
from aot_hooks import Hook

DIFFERING: dict[str, Case] = {
    "aten._batch_norm_with_update.default channels_last": Case("_batch_norm_with_update", 0, "channels_last"),
    "aten._batch_norm_with_update.default of_size_1": Case("_batch_norm_with_update", 0, "of_size_1"),
    "aten._batch_norm_with_update.default permuted": Case("_batch_norm_with_update", 0, "permuted"),
    "aten._conj_physical.default of_size_1": Case("fft_ihfft2", 0, "of_size_1"),
    "aten._log_softmax.default of_size_1": Case("log_softmax_with_dtype", 2, "of_size_1"),
    "aten._native_batch_norm_legit.default channels_last": Case("_native_batch_norm_legit", 0, "channels_last"),
    "aten._native_batch_norm_legit.default of_size_1": Case("_native_batch_norm_legit", 0, "of_size_1"),
    "aten._native_batch_norm_legit.default permuted": Case("_native_batch_norm_legit", 0, "permuted"),
    "aten._unsafe_view.default of_size_1": Case("kron", 0, "of_size_1"),
    "aten.add.Scalar of_size_1": Case("nn_functional_alpha_dropout", 2, "of_size_1"),
    "aten.channel_shuffle.default channels_last": Case("nn_functional_channel_shuffle", 0, "channels_last"),
    "aten.clamp.Tensor of_size_1": Case("clamp", 1, "of_size_1"),
    "aten.clamp_max.Tensor of_size_1": Case("clamp_max", 3, "of_size_1"),
    "aten.clamp_min.Tensor of_size_1": Case("clamp_min", 3, "of_size_1"),
    "aten.copysign.Tensor of_size_1": Case("copysign", 3, "of_size_1"),
    "aten.copysign.Tensor permuted": Case("copysign", 3, "permuted"),
    "aten.div.Scalar permuted": Case("gradient", 3, "permuted"),
    "aten.div.Tensor_mode of_size_1": Case("div_trunc_rounding", 3, "of_size_1"),
    "aten.div.Tensor_mode permuted": Case("div_floor_rounding", 3, "permuted"),
    "aten.floor_divide.default of_size_1": Case("floor_divide", 3, "of_size_1"),
    "aten.floor_divide.default permuted": Case("floor_divide", 3, "permuted"),
    "aten.gelu.default of_size_1": Case("nn_functional_gelu", 0, "of_size_1"),
    "aten.hardshrink.default of_size_1": Case("nn_functional_hardshrink", 0, "of_size_1"),
    "aten.hardswish.default of_size_1": Case("nn_functional_hardswish", 0, "of_size_1"),
    "aten.hardtanh.default of_size_1": Case("nn_functional_hardtanh", 0, "of_size_1"),
    "aten.isinf.default of_size_1": Case("isinf", 0, "of_size_1"),
    "aten.linalg_vector_norm.default of_size_1": Case("masked_normalize", 1, "of_size_1"),
    "aten.logaddexp.default of_size_1": Case("logaddexp", 3, "of_size_1"),
    "aten.logical_and.default of_size_1": Case("logical_and", 3, "of_size_1"),
    "aten.logical_or.default of_size_1": Case("logical_or", 3, "of_size_1"),
    "aten.logical_xor.default of_size_1": Case("logical_xor", 3, "of_size_1"),
    "aten.logit.default of_size_1": Case("logit", 0, "of_size_1"),
    "aten.max_unpool2d.default channels_last": Case("nn_functional_max_unpool2d", 0, "channels_last"),
    "aten.mul.Scalar permuted": Case("gradient", 2, "permuted"),
    "aten.mul.Tensor expanded": Case("nn_functional_multi_head_attention_forward", 0, "expanded"),
    "aten.mul.Tensor of_size_1": Case("nn_functional_rms_norm", 1, "of_size_1"),
    "aten.mul.Tensor permuted": Case("nn_functional_multi_head_attention_forward", 0, "permuted"),
    "aten.native_batch_norm.default channels_last": Case("native_batch_norm", 0, "channels_last"),
    "aten.native_batch_norm.default of_size_1": Case("native_batch_norm", 0, "of_size_1"),
    "aten.native_batch_norm.default permuted": Case("native_batch_norm", 0, "permuted"),
    "aten.renorm.default of_size_1": Case("renorm", 0, "of_size_1"),
    "aten.softshrink.default of_size_1": Case("nn_functional_softshrink", 0, "of_size_1"),
    "aten.view.default expanded": Case("einsum", 3, "expanded"),
    "aten.view.default of_size_1": Case("nn_functional_linear", 2, "of_size_1"),
    "aten.view.default permuted": Case("einsum", 3, "permuted"),
}


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x if x.dtype.is_floating_point or x.dtype.is_complex else ~x


NEGATED = Hook("negated", lambda x: (negated(x), 0), lambda p: negated(p[0]))
FLAT = Hook("flat", lambda x: (x.view(x.shape).reshape(-1), x.shape), lambda p: p[0].view(p[1]))
ALL = math.inf
# hook -> the largest error over the largest value; 0: the same bits
HOOKS: dict[Hook, float] = {
    NEGATED: 0,
    FLAT: 0,
    aot_hooks.offload(0, max_stall_ms=ALL): 0,
    aot_hooks.lossless(): 0,
    aot_hooks.bitmask(): 0,
    aot_hooks.cast(torch.bfloat16): 2**-8,
    aot_hooks.float8(): 2**-4,
    aot_hooks.offload(0, aot_hooks.float8(), max_stall_ms=ALL): 2**-4,
    aot_hooks.int8(8): 1 / 125,
    aot_hooks.int8(8, stochastic=True): 2 / 125,
    aot_hooks.int4(8, stochastic=False): 0.16,
    aot_hooks.int4(8): 0.32,
}
FAST = (NEGATED, aot_hooks.offload(0, max_stall_ms=ALL), aot_hooks.float8(), aot_hooks.int4(8))


def first_reader(x: torch.Tensor) -> torch.Tensor:
    return x.logical_not() if x.dtype is torch.bool else -x


class Reads(torch.fx.Interpreter):
    """Runs a backward and notes the strides of what the nodes read that it returns."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.readers = gm.graph.output_node().all_input_nodes
        self.strides: list[tuple[int, ...]] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self.readers:
            self.strides.append(self.env[n.all_input_nodes[0]].stride())
        return super().run_node(n)


def views_of(x: torch.Tensor, siblings: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of `x`. If they are `siblings`, none is a view of the other."""
    turned = x.transpose(0, -1) if x.dim() > 1 else x.unsqueeze(-1)
    return (x.unsqueeze(0) if siblings else x), turned


def made_by(case: Case, device: str) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The function of `case` that returns a tensor whose strides the trace does not have, and its inputs."""
    op = next(op for op in layouts.operators(device) if op.formatted_name == case.name)
    leaves, spec = layouts.samples(op, device)[case.index]
    leaves = layouts.relaid(leaves, case.layout) or leaves
    at = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]

    def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = [*leaves]
        for i, x in zip(at, tensors, strict=True):
            full[i] = x
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        found = pytree.tree_leaves(op.op(first, *args, **kwargs))
        return [x for x in found if isinstance(x, torch.Tensor) and x.dim() and x.numel()]

    inputs = [leaves[i] for i in at]
    torch.manual_seed(0)
    real = results(*inputs)
    predicted = by_hand(lambda *xs: results(*xs), lambda *xs: xs, *inputs, num_fwd_outputs=0).saved
    strides = [(x.stride(), node.meta["val"].stride()) for x, node in zip(real, predicted, strict=True)]
    which = next((i for i, (a, b) in enumerate(strides) if a != b), 0)
    return lambda *tensors: results(*tensors)[which], inputs


def pair_of(case: Case, device: str, siblings: bool) -> tuple[Pair, list[torch.Tensor]]:
    """Graphs around the operator of `case`: the backward reads two views of its result. And the inputs."""
    made, inputs = made_by(case, device)
    return pair_around(made, inputs, siblings), inputs


def pair_around(made: Callable[..., torch.Tensor], inputs: list[torch.Tensor], siblings: bool) -> Pair:
    def forward(*tensors: torch.Tensor) -> Any:
        return (tensors[0].abs().sum(), *views_of(made(*tensors), siblings))

    def backward(one: torch.Tensor, other: torch.Tensor, g: torch.Tensor) -> Any:
        return first_reader(one), first_reader(other)

    return by_hand(forward, backward, *inputs)


def run(pair: Pair, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """What the backward computes, and the strides of what it reads."""
    torch.manual_seed(0)
    total, *saved = pair.fw(*inputs)
    reads = Reads(pair.bw)
    return list(reads.run(*saved, total)), reads.strides


def check(case: Case, hooks: Any, device: str, siblings: bool) -> bool:
    return compare(*pair_of(case, device, siblings), hooks, str(case))


def compare(pair: Pair, inputs: list[torch.Tensor], hooks: Any, what: str) -> bool:
    """Compare hooks with none. Returns False, without a comparison, if the operator gives other bits in each run."""
    before = [x.clone() for x in inputs]

    def run_anew(pair: Pair) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        for x, old in zip(inputs, before, strict=True):  # running statistics are written to
            if not torch.equal(x, old):
                x.copy_(old)
        return run(pair, inputs)

    expected, strides = run_anew(pair.copy())
    again, strides_again = run_anew(pair.copy())
    if strides != strides_again or not all(map(torch.equal, expected, again)):
        return False
    for hook in hooks:
        after = pair.copy().apply(hook)
        found, found_strides = run_anew(after)
        at_most, where = HOOKS[hook], f"{hook} on {what}"
        packed = [d.hook is not aot_hooks.KEEP for d in after.plan.decisions]  # type: ignore[union-attr]
        assert hook not in (NEGATED, FLAT) or all(packed), where
        if not at_most or not expected[0].is_floating_point():
            assert found_strides == strides, where
            assert all(map(torch.equal, found, expected)), (where, strides, *map(differences, found, expected))
            continue
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() <= at_most * b.abs().max(), where
    return True


def differences(found: torch.Tensor, expected: torch.Tensor) -> str:
    different = (found != expected).nonzero().tolist()
    return f"{len(different)} of {found.numel()} values, in shape {tuple(found.shape)}, at {different[:4]}"


@functools.cache
def by_operator() -> dict[str, Case]:
    """One case an operator, whatever the layout of its inputs."""
    return {name.split()[0]: case for name, case in DIFFERING.items()}


@pytest.mark.parametrize("name", by_operator())
def test_views_are_of_what_really_came(name: str) -> None:
    assert check(by_operator()[name], FAST, "cpu", siblings=len(name) % 2 == 0), "the operator is not reproducible"


@torch.library.custom_op("aot_hooks_test::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 2).clone(memory_format=torch.contiguous_format).transpose(0, 2)


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    """The strides of another order of dimensions, as torch predicts them for `rfftn` of a permuted tensor on CUDA."""
    return x.new_empty_strided(x.shape, (x.shape[0], 1, x.shape[0] * x.shape[1]))


@pytest.mark.core
def test_an_overlap_that_only_the_trace_has_is_none() -> None:
    x = torch.randn(16, 17, 16)
    assert compare(pair_around(turned, [x], siblings=False), [x], FAST, "turned")


@pytest.mark.slow
def test_every_hook_gives_back_what_really_came() -> None:
    """Of every second case the two views are siblings."""
    for number, case in enumerate(DIFFERING.values()):
        assert check(case, HOOKS, "cpu", siblings=number % 2 == 0), f"{case} is not reproducible"


@pytest.mark.slow
def test_the_table_has_all_operators_that_a_search_finds() -> None:
    assert layouts.differing(layouts.operators("cpu"), "cpu") == DIFFERING


def check_fallback(case: Case, device: str) -> bool:
    """Compare a hook with none where Inductor calls the operator as it is. False if both raise the same error.

    Inductor compares the strides of some results with those of the trace, and raises, with hooks and without.
    """
    made, inputs = made_by(case, device)
    if not inputs[0].is_floating_point():
        return False

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        one, other = views_of(made(*tensors), siblings=True)
        return (one.sin() * one.detach()).sum() + other.tanh().sum()

    def outcome(policy: Any) -> Any:
        torch._dynamo.reset()
        first, others = (
            inputs[0].detach().requires_grad_(),
            [x.clone() for x in inputs[1:]],
        )  # statistics are written to
        torch.manual_seed(0)
        compiled = torch.compile(loss, backend="aot_hooks", options={"policy": policy})
        try:
            return torch.autograd.grad(compiled(first, *others), first)[0]
        except (AssertionError, RuntimeError) as error:
            return str(error).splitlines()[0][:40]

    with torch._inductor.config.patch(fallback_by_default=True):
        expected, found = outcome(aot_hooks.KEEP), outcome(NEGATED)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, (case, found, expected)
        return False
    assert torch.equal(found, expected), (case, differences(found, expected))
    return True


@pytest.mark.slow
def test_fallback_kernels_of_inductor() -> None:
    compared = [case for case in by_operator().values() if check_fallback(case, "cpu")]
    assert len(compared) >= 8, compared


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu() -> None:
    """The operators of the table, and those of cuFFT and of CUDA's linear algebra. All of `op_db` take three minutes.

    Where the operator itself is another one in each run, a comparison of bits says nothing about hooks.
    """
    ops = [op for op in layouts.operators("cuda") if looked_at_on_a_gpu(op.formatted_name)]
    found = layouts.differing(iter(ops), "cuda")
    assert found, "no operator differs: the search finds nothing"
    compared = [check(case, (*FAST, FLAT), "cuda", i % 2 == 0) for i, case in enumerate(found.values())]
    assert sum(compared) >= 0.9 * len(found), [
        case for case, did in zip(found.values(), compared, strict=True) if not did
    ]


def looked_at_on_a_gpu(name: str) -> bool:
    return name in {case.name for case in DIFFERING.values()} or name.startswith(("fft_", "linalg_"))


# --- whole programs --------------------------------------------------------------------------------------------------


def normalized_product(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    """The normalized tensor is contiguous, its fake one is transposed; two views of it are saved."""
    h = norm(x.transpose(1, 2))
    return (h @ h.transpose(1, 2)).tanh()


def slices(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    h = norm(x.transpose(1, 2))
    return (h[:, :16] @ h[:, 16:].transpose(1, 2)).tanh() @ h[:, 3:19, 1:]


def moving_average(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    """The backward of the pooling chooses by the stride of a dimension of size 1."""
    x = norm(x.transpose(1, 2)).transpose(1, 2)
    padded = torch.cat([x[:, :1].repeat(1, 2, 1), x, x[:, -1:].repeat(1, 2, 1)], 1)
    trend = torch.nn.functional.avg_pool1d(padded.permute(0, 2, 1), 5, 1).permute(0, 2, 1)
    return (x - trend).tanh() * trend


def gradients(program: Callable[..., torch.Tensor], tokens: int = 8) -> list[torch.Tensor]:
    norm = torch.nn.BatchNorm1d(32)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, tokens, 32, generator=generator, requires_grad=True)
    out = program(x, norm)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [x.grad, norm.weight.grad, norm.bias.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("program, dynamic", [(normalized_product, False), (slices, True), (moving_average, False)])
def test_exact_hooks_change_no_bit(program: Callable[..., torch.Tensor], dynamic: bool) -> None:
    def policy(saved: aot_hooks.SavedTensor) -> Hook:
        return FLAT if saved.nbytes % 3 else aot_hooks.offload(0, max_stall_ms=ALL)

    options = {"inner": "aten", "policy": policy}
    compiled = torch.compile(program, backend="aot_hooks", options=options, dynamic=dynamic)
    stock = torch.compile(program, backend="aot_eager", dynamic=dynamic)
    for tokens in (8, 12) if dynamic else (8,):
        expected = gradients(stock, tokens)
        assert all(map(torch.equal, gradients(compiled, tokens), expected))
    with aot_hooks.saved_tensors_hooks(FLAT, scope="all"):
        assert all(map(torch.equal, gradients(program), gradients(program)))


@pytest.mark.parametrize("hook", [aot_hooks.int8(16), aot_hooks.int4(16, stochastic=False)], ids=repr)
@pytest.mark.parametrize("program", [normalized_product, slices])
def test_rounding_hooks_err_no_more_than_in_eager_code(program: Callable[..., torch.Tensor], hook: Hook) -> None:
    compiled = torch.compile(program, backend="aot_hooks", options={"inner": "aten", "policy": hook})
    expected, found = gradients(program), gradients(compiled)
    with aot_hooks.saved_tensors_hooks(hook, scope="all"):
        eager = gradients(program)
    for a, b, c in zip(found, eager, expected, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm()
