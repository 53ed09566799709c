"""Random losses over a linear layer: `options["chunk"]` computes them right, or leaves them alone and says why.

      python tests/support/fuzz_chunk.py --first 0 --count 2000
      python tests/support/fuzz_chunk.py --first 17 --count 1 --verbose
      python tests/support/fuzz_chunk.py --joint --first 0 --count 2000 --out PATH

A case is drawn from parts: shape of the tokens, dtype, kind of the last layer, what stands between it and the loss, the
loss, and what the program does around it. fuzz_parts.py compares its gradients with those of eager mode.

With `--joint` neither Dynamo nor a partition runs: the joint graph is traced, computed in chunks, and run as one. This
takes a third of the time. Sizes are numbers, and each case is one step. With `--decomposed` it is a joint graph for
Inductor on CUDA: losses are element by element, so that gradients of logits are computed over logits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import fuzz_parts
import torch
import torch.nn.functional as F
from fuzz_parts import Computed, Outcome, computed, judged, main, state_of, tangent_of, traced
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from aot_hooks.passes import chunk_order
from aot_hooks.passes.chunk import chunked

__all__ = ["Case", "check", "check_joint", "generate"]

WIDTH, WORDS = 8, 48
HEADS = ("plain", "plain", "bias", "tied", "lora", "frozen", "matmul")
BETWEEN = ("float", "float", "none", "softcap", "scale", "padded", "temperature")
LOSSES = (
    "mean",
    "mean",
    "sum",
    "none",
    "masked",
    "smoothed",
    "weighted",
    "z_loss",
    "by_hand",
    "gathered",
    "preference",
    "distilled",
    "teacher_layer",
    "soft_targets",
    "focal",
    "entropy",
    "shifted",
    "shifted_logits",
    "shifted_logits",
    "dropped_first",
    "sliced_teacher",
    "sliced_and_whole",
    "sliced_twice",
    "gathered_slice",
    "transposed",
    "transposed_by_hand",
    "shifted_transposed",
    "dpo",
    "perplexity",
    "global",
    "returned",
    "accuracy",
    "two",
)


ALONE = ("global", "returned", "sliced_and_whole")  # losses that need all logits
SEQUENCES = (  # losses of tokens [B, T]
    *("shifted", "shifted_logits", "preference", "dropped_first", "sliced_teacher", "sliced_and_whole"),
    *("sliced_twice", "gathered_slice", "transposed", "transposed_by_hand", "shifted_transposed", "dpo"),
)


@dataclass(frozen=True)
class Case(fuzz_parts.Case):
    head: str
    between: str
    loss: str
    scale: float  # of the loss, outside of the compiled function
    steps: int  # whose gradients are summed
    tokens: int  # of a chunk


def generate(seed: int) -> Case:
    draw = random.Random(seed)
    shape = draw.choice(((24,), (37,), (2, 15), (3, 8), (1, 29), (2, 1, 12)))
    loss = draw.choice(LOSSES)
    if loss in SEQUENCES:
        shape = draw.choice(((2, 15), (1, 29), (3, 8)))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return Case(
        seed=seed,
        shape=shape,
        dtype=dtype,
        head=draw.choice(HEADS),
        between=draw.choice(BETWEEN),
        loss=loss,
        scale=draw.choice((1.0, 1.0, 0.25, 0.3, 8.0)),
        steps=draw.choice((1, 1, 2)),
        tokens=draw.choice((8, 10, 12)),
        autocast=dtype == torch.float32 and draw.random() < 0.2,
        dynamic=draw.random() < 0.15,
    )


class Program(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=case.head == "bias")
        self.teacher = nn.Linear(WIDTH, WORDS).requires_grad_(False)
        if case.head == "tied":
            self.head.weight = self.embedding.weight
        elif case.head == "frozen":
            self.head.requires_grad_(False)
        elif case.head == "lora":
            self.head.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WORDS, bias=False)
        self.second = nn.Linear(WIDTH, WORDS, bias=False) if case.loss == "two" else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        case = self.case
        z = hidden @ self.head.weight.t() if case.head == "matmul" else self.head(hidden)
        if case.head == "lora":
            z = z + 2 * self.up(self.down(hidden))
        if case.between == "float":
            z = z.float()
        elif case.between == "softcap":
            z = 5 * torch.tanh(z / 5)
        elif case.between == "scale":
            z = z * 0.5
        elif case.between == "padded":
            z = z[..., : WORDS - 5]
        elif case.between == "temperature":
            z = z.double() / 1.7 if z.dtype == torch.float64 else z.float() / 1.7
        return z

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Any:
        hidden = self.norm(self.embedding(ids) * 3)
        z = self.logits(hidden)
        return getattr(self, f"loss_{self.case.loss}")(z, labels, mask, hidden)

    def loss_mean(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return F.cross_entropy(z.flatten(0, -2), labels.flatten())

    def loss_sum(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return F.cross_entropy(z.flatten(0, -2), labels.flatten(), reduction="sum") / 7

    def loss_none(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return F.cross_entropy(z.flatten(0, -2), labels.flatten(), reduction="none")

    def loss_masked(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        each = F.cross_entropy(z.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
        return (each * mask).sum() / mask.sum().clamp(min=1)

    def loss_smoothed(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return F.cross_entropy(z.flatten(0, -2), labels.flatten(), label_smoothing=0.1)

    def loss_weighted(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        weight = torch.linspace(0.5, 2, z.shape[-1], dtype=z.dtype, device=z.device)
        return F.cross_entropy(z.flatten(0, -2), labels.flatten(), weight=weight, label_smoothing=0.05)

    def loss_z_loss(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return self.loss_mean(z, labels, mask, hidden) + 0.01 * torch.logsumexp(z, -1).square().mean()

    def loss_by_hand(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        safe = labels.clamp(min=0)
        picked = z.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        return ((torch.logsumexp(z, -1) - picked) * (labels >= 0)).mean()

    def loss_gathered(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        logp = z.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(logp * mask).sum(-1).mean()

    def loss_preference(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        logp = z.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sequences = (logp * mask).sum(-1) * 0.1
        return -F.logsigmoid(sequences - sequences.mean() + 0.2).mean()

    def loss_distilled(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        teacher = (torch.arange(z.shape[-1], device=z.device) % 7 + ids_like(labels, z)).to(z.dtype) * 0.2
        return F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="sum") / labels.numel()

    def loss_teacher_layer(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        teacher = self.teacher(hidden.detach())[..., : z.shape[-1]].to(z.dtype).log_softmax(-1)
        return F.kl_div(z.log_softmax(-1), teacher, reduction="batchmean", log_target=True)

    def loss_soft_targets(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        soft = F.one_hot(labels.clamp(min=0), z.shape[-1]).to(z.dtype) * 0.9 + 0.1 / z.shape[-1]
        return F.cross_entropy(z.flatten(0, -2), soft.flatten(0, -2))

    def loss_focal(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        logp = z.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -((1 - logp.exp()).square() * logp).mean()

    def loss_entropy(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        logp = z.log_softmax(-1)
        return self.loss_mean(z, labels, mask, hidden) + 0.1 * (logp.exp() * logp).sum(-1).mean()

    def loss_shifted(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        after = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(z.view(-1, z.shape[-1]), after.view(-1), reduction="sum") / 11

    def loss_shifted_logits(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        z, labels = z[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(z.view(-1, z.shape[-1]), labels.view(-1))

    def loss_dropped_first(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        z, labels = z[:, 1:], labels[:, 1:]
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), labels.flatten(), label_smoothing=0.1)

    def loss_sliced_teacher(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        teacher = self.teacher(hidden.detach())[:, :-1, : z.shape[-1]].to(z.dtype).log_softmax(-1)
        return F.kl_div(z[:, :-1].log_softmax(-1), teacher, reduction="sum", log_target=True) / labels.numel()

    def loss_sliced_and_whole(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        """The logits of all tokens count in one part of the loss: left alone."""
        return self.loss_shifted_logits(z, labels, mask, hidden) + 0.01 * torch.logsumexp(z, -1).square().mean()

    def loss_sliced_twice(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        z, labels = z[:, :-1][:, 2:], labels[:, 3:]
        return F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="sum") / 5

    def loss_gathered_slice(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        safe, mask = labels[:, 1:].clamp(min=0), mask[:, 1:]
        picked = z[:, :-1].gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        return ((z[:, :-1].logsumexp(-1) - picked) * mask).sum() / mask.sum().clamp(min=1)

    def loss_transposed(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        weight = torch.linspace(0.5, 2, z.shape[-1], dtype=z.dtype) if self.case.seed % 3 == 0 else None
        smoothing = 0.1 if self.case.seed % 2 else 0.0
        return F.cross_entropy(z.transpose(1, 2), labels, weight=weight, label_smoothing=smoothing)

    def loss_transposed_by_hand(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        logp = z.permute(0, 2, 1).log_softmax(1)
        return -(logp.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1) * mask).sum(-1).mean()

    def loss_shifted_transposed(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        each = F.cross_entropy(z[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (each * mask[:, 1:]).sum() / mask.sum().clamp(min=1)

    def loss_dpo(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        """Log-probabilities of the sequences, of the model and of a reference, whose difference is compared."""
        safe, mask = labels[:, 1:].clamp(min=0).unsqueeze(-1), mask[:, 1:]
        reference = self.teacher(hidden.detach())[..., : z.shape[-1]].to(z.dtype)
        ours, theirs = (
            (each[:, :-1].log_softmax(-1).gather(-1, safe).squeeze(-1) * mask).sum(-1) for each in (z, reference)
        )
        rewards = 0.1 * (ours - theirs)
        return -F.logsigmoid(rewards - rewards.flip(0) + 0.1).mean()

    def loss_perplexity(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return self.loss_mean(z, labels, mask, hidden).exp()

    def loss_global(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return F.cross_entropy((z - z.mean()).flatten(0, -2), labels.flatten())

    def loss_returned(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        return self.loss_mean(z, labels, mask, hidden), z

    def loss_accuracy(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        right = (z.detach().argmax(-1) == labels).sum()
        return self.loss_mean(z, labels, mask, hidden), right

    def loss_two(self, z: Any, labels: Any, mask: Any, hidden: Any) -> Any:
        other = self.second(hidden.tanh())  # type: ignore[misc]
        return self.loss_mean(z, labels, mask, hidden) + 0.3 * F.cross_entropy(other.flatten(0, -2), ids_of(labels))


def ids_of(labels: torch.Tensor) -> torch.Tensor:
    return labels.flatten().clamp(min=0)


def ids_like(labels: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return labels.unsqueeze(-1) % 5


def _inputs(case: Case, step: int) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(100 * case.seed + step)
    shape = case.shape if not case.dynamic or step == 0 else (*case.shape[:-1], case.shape[-1] + 3)
    words = WORDS - 5 if case.between == "padded" else WORDS
    ids, labels = (torch.randint(n, shape, generator=make) for n in (WORDS, words))
    mask = torch.rand(shape, generator=make) < 0.7
    return ids, torch.where(torch.rand(shape, generator=make) < 0.2, -100, labels), mask


def _run(program: Program, run: Any, case: Case, autocast: bool) -> list[torch.Tensor]:
    """Losses of all steps, then the gradients."""
    program.zero_grad()
    losses = []
    for step in range(max(case.steps, 2 if case.dynamic else 1)):
        ids, labels, mask = _inputs(case, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(ids, labels, mask)
        loss = out[0] if isinstance(out, tuple) else out
        losses += [o.detach() for o in (out if isinstance(out, tuple) else (out,))]
        (loss * tangent_of(loss)).sum().mul(case.scale).backward()
    return losses + [p.grad for p in program.parameters() if p.grad is not None]


def check(case: Case, inner: str = "aten") -> Outcome:
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    return _judged(case, program, computed(program, _run, case, inner, ("chunk", case.tokens)))


def check_joint(case: Case, *, decomposed: bool = False) -> Outcome:
    """`check` of the pass alone. `decomposed`: of a graph for Inductor on CUDA."""
    case = dataclasses.replace(case, dynamic=False, steps=1)
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    state, trained = state_of(program)
    inputs = _inputs(case, 0)

    def joint(state: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], tangent: torch.Tensor) -> Any:
        leaves = {name: p.detach().requires_grad_(name in trained) for name, p in state.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            out = torch.func.functional_call(program, leaves, inputs)
        outs = out if isinstance(out, tuple) else (out,)
        return outs, torch.autograd.grad(outs[0], [leaves[name] for name in trained], tangent, allow_unused=True)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        out = program(*inputs)
    tangent = tangent_of(out[0] if isinstance(out, tuple) else out, case.scale)
    table = select_decomp_table() if decomposed else None
    with contextlib.ExitStack() as as_on_cuda:
        if decomposed:  # Inductor compares indices where the table has scatter
            as_on_cuda.enter_context(mock.patch.object(chunk_order, "fuses", lambda _: True))
            as_on_cuda.enter_context(mock.patch.object(chunk_order, "_rounds_nothing", lambda _: False))
        chunks, rows = chunked(traced(joint, state, inputs, tangent, tangents=1, table=table), case.tokens)
    outs, gradients = chunks(state, inputs, tangent)
    found = [o.detach() for o in outs] + [g for g in gradients if g is not None]
    return _judged(case, program, Computed(found, rows, []))


def _judged(case: Case, program: Program, found: Computed) -> Outcome:
    program.zero_grad()
    return judged(program, _run, case, found, expected={case.loss not in ALONE})


def outcomes_of(case: Case, options: argparse.Namespace) -> list[Outcome]:
    joint = options.joint or options.decomposed
    return [check_joint(case, decomposed=options.decomposed) if joint else check(case, options.inner)]


if __name__ == "__main__":
    main(generate, outcomes_of, "chunks", by="loss")
