"""`options["chunk"]`: the last layer and its loss in chunks of tokens give the same gradients in less memory."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import fuzz_chunk
import pytest
import torch
import torch.nn.functional as F
from fuzz_parts import distance
from profiled import most_allocated
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import errors
from aot_hooks.passes import chunk_loop
from aot_hooks.passes.chunk import Chunked

ATEN = {"inner": "aten"}
WIDTH, WORDS = 16, 64


class Model(nn.Module):
    """A block, a last layer, and a loss."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def example(count: int = 50, words: int = WORDS, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    labels = torch.randint(words, (2, count // 2), generator=make)
    labels[0, :3] = -100
    return torch.randn(2, count // 2, width, generator=make), labels


def model(words: int = WORDS, width: int = WIDTH) -> Model:
    torch.manual_seed(0)
    return Model(words, width)


def compiled(module: Any, chunk: Any = 16, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_hooks", options=ATEN | {"chunk": chunk} | options)


def gradients(module: nn.Module, run: Any, *inputs: torch.Tensor, retain: bool = False) -> list[torch.Tensor]:
    module.zero_grad()
    loss = run(*inputs)
    if retain:
        loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def notes(run: Any) -> list[Chunked]:
    return [row for plan in aot_hooks.last_plans(run) for row in plan.chunked]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize(("first", "count"), [(0, 5), pytest.param(5, 10, marks=pytest.mark.slow)])
def test_random_losses_are_right_in_chunks_or_left_alone_with_the_reason(first: int, count: int) -> None:
    outcomes = [fuzz_chunk.check(fuzz_chunk.generate(seed)) for seed in range(first, first + count)]
    assert [o for o in outcomes if o.wrong] == []
    assert sum(o.done for o in outcomes) >= count // 2


@pytest.mark.parametrize(
    ("first", "decomposed"),
    [(4000, False), (20, True)],
)
def test_random_joint_graphs_are_right_in_chunks(first: int, decomposed: bool) -> None:
    seeds = range(first, first + 12)
    outcomes = [fuzz_chunk.check_joint(fuzz_chunk.generate(seed), decomposed=decomposed) for seed in seeds]
    assert [o for o in outcomes if o.wrong] == []
    assert sum(o.done for o in outcomes) >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "loss",
    ["shifted_logits", "dropped_first", "sliced_twice", "sliced_teacher", "transposed", "shifted_transposed", "dpo"],
)
def test_sliced_and_transposed_logits_are_in_chunks(loss: str, dtype: torch.dtype) -> None:
    case = dataclasses.replace(fuzz_chunk.generate(0), loss=loss, shape=(3, 15), dtype=dtype, tokens=8)
    outcome = fuzz_chunk.check_joint(case)
    assert outcome.done and not outcome.wrong


def test_chunks_of_sliced_logits_follow_the_sizes(tmp_path: Path) -> None:
    """In one graph for all sizes. One chunk of the tokens that are left is alive."""
    case = dataclasses.replace(
        fuzz_chunk.generate(0), loss="shifted_logits", shape=(2, 15), dtype=torch.float32, tokens=8, dynamic=True
    )
    outcome = fuzz_chunk.check(case)
    assert outcome.done and not outcome.wrong
    module = model(4096)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = module.head(x)[:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, 4096), labels[:, 1:].reshape(-1))

    x, labels = example(512, 4096)
    x.requires_grad_()
    run = compiled(loss, 64, policy=aot_hooks.KEEP)
    assert most_allocated(lambda: run(x, labels).backward(), tmp_path) <= 0.5 * 4 * 512 * 4096
    (row,) = (row for plan in aot_hooks.last_plans(run) for row in plan.chunked)
    assert (row.count, row.tokens) == (8, 69)  # of 2 * 255, the last chunk has what remains


def test_logits_that_are_read_whole_and_sliced_are_left_alone() -> None:
    case = dataclasses.replace(fuzz_chunk.generate(0), loss="sliced_and_whole", shape=(3, 15), tokens=8)
    outcome = fuzz_chunk.check_joint(case)
    assert not outcome.done and not outcome.wrong and "needs all tokens" in outcome.why


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [
        *(("aten", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_logits_of_one_chunk_are_alive(dtype: torch.dtype, inner: str, tmp_path: Path) -> None:
    """On the CPU sums are made in float32, and so are gradients of logits, whose chunk counts more than its logits."""
    count, words, chunks = 512, 4096, 8
    module = model(words).to(dtype)
    x, labels = example(count, words)
    x = x.to(dtype)
    peaks, found = [], []
    for chunk in (False, count // chunks):
        run = compiled(module, chunk, inner=inner)
        found.append(gradients(module, run, x, labels))
        module.zero_grad()

        def step(run: Any = run) -> None:
            run(x, labels).backward()

        peaks.append(most_allocated(step, tmp_path))
        module.zero_grad()
    tolerance = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.03}[dtype]  # several roundings of each
    assert_close(found[1], found[0], tolerance)
    logits = count * words * 4
    alive = 3 if inner == "aten" else 2  # values of the size of a chunk's logits: log_softmax, its gradient, logits
    others = words * WIDTH * 16 + 2**20
    assert peaks[0] >= logits * (1 if dtype == torch.float32 else 0.5)
    assert peaks[1] <= alive * logits / chunks + others
    assert peaks[1] <= (0.6 if inner == "aten" else 0.75) * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_at_least_as_near_to_float64(dtype: torch.dtype, reduction: str) -> None:
    """Of the weight and of the hidden states. Float32 products of other sizes round otherwise, by some percent."""
    x, labels = example(256)
    head = nn.Linear(WIDTH, WORDS, bias=False).to(dtype)

    def loss(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.t()).flatten(0, -2).float(), labels.flatten(), reduction=reduction)

    def found(run: Any, wide: bool = False) -> list[torch.Tensor]:
        inputs = [t.detach().to(torch.float64 if wide else dtype).requires_grad_() for t in (head.weight, x.to(dtype))]
        out = run(*inputs) if not wide else exact(*inputs)
        (0.3 * (out * torch.linspace(0.5, 1.5, out.numel()).to(out.dtype).view(out.shape)).sum()).backward()
        return [t.grad for t in inputs]

    def exact(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.t()).flatten(0, -2), labels.flatten(), reduction=reduction)

    expected = found(None, wide=True)
    mine, theirs = (
        [distance(a, b) for a, b in zip(found(compiled(loss, chunk)), expected, strict=True)] for chunk in (32, False)
    )
    assert all(a <= b * (1.05 if dtype == torch.float32 else 1.0) for a, b in zip(mine, theirs, strict=True))


def test_large_sums_are_parts_that_are_rounded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some rows each, the last with what remains. Gradients are no further from float64 than those of one sum."""
    x, labels = example(256, words=62)
    module = model(words=62).to(torch.bfloat16)
    wide = model(words=62).double()
    wide.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    expected = gradients(
        wide,
        lambda x, labels: F.cross_entropy(
            wide.head(wide.norm(x + wide.down(F.gelu(wide.up(x))))).flatten(0, -2), labels.flatten()
        ),
        x.double(),
        labels,
    )
    found = []
    for nbytes in (1 << 30, 4 * 62 * WIDTH // 4):
        monkeypatch.setattr(chunk_loop, "_PART_BYTES", nbytes)
        run = compiled(module, 32, policy=aot_hooks.KEEP)
        found.append(gradients(module, run, x.to(torch.bfloat16), labels))
        (plan,) = aot_hooks.last_plans(run)
        sums = [d.saved.shape for d in plan.decisions if "add_product" in d.saved.name]
        assert sums == ([(62, WIDTH)] if nbytes == 1 << 30 else [(16, WIDTH)] * 3 + [(14, WIDTH)])
    plan = aot_hooks.plan(compiled(module, 32, policy=aot_hooks.KEEP), x.to(torch.bfloat16), labels)
    backward = [point.node for point in plan.live_after if point.phase == "backward"]
    rounded = next(i for i, name in enumerate(backward) if name.startswith("join_rows"))
    products = [i for i, name in enumerate(backward) if name.startswith("mm")]
    assert rounded < min(products)  # not at the end, beside all other gradients
    one, parts = ([distance(a, b) for a, b in zip(each, expected, strict=True)] for each in found)
    assert all(b <= 1.01 * a for a, b in zip(one, parts, strict=True))


@pytest.mark.parametrize(
    "policy",
    [aot_hooks.float8(), aot_hooks.offload(min_bytes=0), aot_hooks.budget("1MiB"), aot_hooks.KEEP],
    ids=["float8", "offload", "budget", "keep"],
)
def test_hooks_pack_what_they_did_and_no_gradient(policy: Any) -> None:
    x, labels = example()
    module = model()
    expected = gradients(module, module, x, labels)
    run = compiled(module, policy=policy)
    found = gradients(module, run, x, labels)
    assert_close(found, expected, 0.05 if policy == aot_hooks.float8() else 1e-5)
    assert_close(found[-1:], expected[-1:], 1e-2 if policy == aot_hooks.float8() else 1e-5)
    assert [row.done for row in notes(run)] == [True]
    (plan,) = aot_hooks.last_plans(run)
    early = [d for d in plan.decisions if "the forward made" in d.reason]
    assert len(early) == 4 + 1 and all(d.hook is aot_hooks.KEEP for d in early)  # of each chunk's tokens, of the weight


def test_a_second_backward_and_checkpointing() -> None:
    x, labels = example()
    module = model()
    expected = gradients(module, module, x, labels, retain=True)
    assert_close(gradients(module, compiled(module), x, labels, retain=True), expected)

    def checkpointed(x: torch.Tensor, labels: torch.Tensor) -> Any:
        return checkpoint(module, x, labels, use_reentrant=False)

    expected = gradients(module, module, x, labels)
    assert_close(gradients(module, compiled(checkpointed), x, labels), expected)


def test_without_gradients_the_loss_is_in_chunks_too(tmp_path: Path) -> None:
    count, words = 512, 4096
    module = model(words).eval()
    x, labels = example(count, words)
    peaks, losses = [], []
    for chunk in (False, 64):
        run = compiled(module, chunk)
        with torch.no_grad():
            losses.append(run(x, labels))
            peaks.append(most_allocated(lambda run=run: run(x, labels), tmp_path))
    assert torch.allclose(*losses)
    assert peaks[1] <= 0.35 * peaks[0]


def test_other_numbers_of_tokens_need_no_other_graph() -> None:
    module = model()
    torch._dynamo.reset()
    run = torch.compile(module, backend="aot_hooks", options=ATEN | {"chunk": 16}, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.UnusedWarning)
        for count in (50, 62, 38, 110):
            x, labels = example(count)
            with torch._dynamo.config.patch(error_on_recompile=count != 50):
                assert_close(gradients(module, run, x, labels), gradients(module, module, x, labels))


def test_returned_logits_are_left_alone_and_the_warning_says_what_to_do() -> None:
    module = model()

    def program(x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = module.head(module.norm(x))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits

    run = compiled(program)
    with pytest.warns(errors.UnusedWarning, match="the program returns float32.*Return the loss alone"):
        run(*example())[0].backward()

    run = compiled(lambda x: module.head(module.norm(x)).log_softmax(-1))
    with pytest.warns(errors.UnusedWarning, match="returns"):
        run(example()[0]).sum().backward()


def test_a_graph_that_is_small_is_left_alone_without_a_number() -> None:
    module = model()
    run = compiled(module, True, policy=aot_hooks.KEEP)
    gradients(module, run, *example())
    assert notes(run) == []


def test_wrong_values_of_the_option_say_what_is_expected() -> None:
    for wrong in (-1, "yes", 0.5):
        with pytest.raises(Exception, match="the number of tokens that a chunk has at most") as e:
            compiled(model(), wrong)(*example())
        assert errors.error_behind(e.value, errors.OptionError) is not None


def test_enable_takes_the_option() -> None:
    module = model()
    x, labels = example()
    expected = gradients(module, module, x, labels)
    torch._dynamo.reset()
    with aot_hooks.enable(aot_hooks.KEEP, options=ATEN | {"chunk": 16}):
        run = torch.compile(module)
        assert_close(gradients(module, run, x, labels), expected)
    assert [row.done for row in notes(run)] == [True]


class Centered(Model):
    """Scores of tokens that read a buffer, which the forward writes to afterwards."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__(words, width)
        self.register_buffer("center", torch.zeros(words))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = torch.logsumexp(self.head(self.norm(x)) - self.center, -1)
        with torch.no_grad():
            self.center.add_(torch.arange(self.center.numel()) / 8)
        return scores


@pytest.mark.parametrize("trains", [True, False])
def test_chunks_read_a_buffer_before_the_step_writes_to_it(trains: bool) -> None:
    torch.manual_seed(0)
    ours, eager = Centered(), Centered()
    eager.load_state_dict(ours.state_dict())
    run, inputs = compiled(ours, policy=aot_hooks.lossless()), example()
    for _ in range(3):
        with torch.set_grad_enabled(trains):
            found, expected = run(*inputs), eager(*inputs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours.center, eager.center)
    assert [row.done for row in notes(run)] == [True] * trains


class Shifted(Model):
    """What each token but the last adds to the loss: sizes of outputs are that of the input less one."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.head(self.norm(x))[:, :-1], -1)


def test_chunks_of_scores_with_sizes_of_their_own() -> None:
    torch.manual_seed(0)
    module = Shifted()
    torch._dynamo.reset()
    options = ATEN | {"chunk": 16, "policy": aot_hooks.lossless()}
    run = torch.compile(module, backend="aot_hooks", options=options, dynamic=True)
    for count in (50, 64, 90):
        inputs = example(count)
        module.zero_grad()
        found = run(*inputs)
        found.sum().backward()
        ours = module.head.weight.grad.clone()
        module.zero_grad()
        expected = module(*inputs)
        expected.sum().backward()
        assert_close([found.detach(), ours], [expected.detach(), module.head.weight.grad])
    assert all(row.done for row in notes(run)) and len(notes(run)) == 1


def test_a_mask_of_another_dtype_than_its_model_stays_one() -> None:
    """`new_ones` and `new_zeros` are written anew, in the dtype that the program asks for."""
    module, (x, labels) = model(), example(64)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = labels.new_ones(labels.shape, dtype=torch.bool).cumsum(-1) > labels.new_zeros((), dtype=torch.int32)
        return module(torch.where((seen & (labels != 7)).unsqueeze(-1), x, x.new_zeros(())), labels)

    expected = gradients(module, loss, x, labels)
    assert_close(gradients(module, compiled(loss), x, labels), expected)


class Adapted(nn.Module):
    """A linear layer that is not trained, with an adapter of rank 4, in the dtypes and order of PEFT's."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.base = nn.Linear(64, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return (result + self.up(self.down(x.to(self.down.weight.dtype))) * 2).to(result.dtype)


class Attended(nn.Module):
    """Adapted queries in an attention whose softmax is not fused."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.bmm(self.query(x).view(4, 16, 64), x.view(4, 64, 16)), -1)


def adapted(make: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return make(), torch.randn(64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [Adapted, Attended])
def test_an_adapter_is_no_last_layer(make: Any) -> None:
    module, x = adapted(make)
    run = compiled(module, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.UnusedWarning)
        run(x).float().sum().backward()
    assert not notes(run)


@pytest.mark.parametrize("width", [64, 256])
def test_a_last_layer_with_an_adapter_is_in_chunks(width: int) -> None:
    """Also one that has not more words than hidden units, whose adapter alone is wider than its inputs."""
    module, x = adapted(lambda: Adapted(width))
    labels = torch.arange(64) % width
    labels[:5] = -100

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x).float(), labels)

    wide = copy.deepcopy(module).double()
    exact = gradients(wide, lambda x: F.cross_entropy(wide(x), labels), x.double())
    run = compiled(loss, 16, policy=aot_hooks.KEEP)
    mine, theirs = (gradients(module, each, x) for each in (run, loss))
    assert [row.count for row in notes(run)] == [4]
    assert all(distance(a, c) <= 1.1 * distance(b, c) + 1e-5 for a, b, c in zip(mine, theirs, exact, strict=True))
