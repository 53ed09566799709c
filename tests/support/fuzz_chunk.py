"""Random losses over a linear layer: `options["chunk"]` computes them right, or leaves them alone and says why.

      python tests/support/fuzz_chunk.py --first 0 --count 2000
      python tests/support/fuzz_chunk.py --first 17 --count 1 --verbose
      python tests/support/fuzz_chunk.py --joint --first 0 --count 2000 --out PATH

A case is drawn from parts: shape of the tokens, dtype, kind of the last layer, what stands between it and the loss, the
loss, and what the program does around it. Its gradients are compared with those of the same module in eager mode, by
the distance of both to float64.

With `--joint` neither Dynamo nor a partition runs: the joint graph is traced, computed in chunks, and run as one. This
takes a third of the time. Sizes are numbers, and each case is one step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import aot_hooks
from aot_hooks.errors import UnusedWarning
from aot_hooks.passes.chunk import chunked

__all__ = ["Case", "Outcome", "check", "check_joint", "generate"]

WIDTH, WORDS = 8, 48
DECOMPOSED = get_decompositions([torch.ops.aten.t, torch.ops.aten.embedding_dense_backward])
EPS = {torch.float32: 8e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
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
class Case:
    seed: int
    shape: tuple[int, ...]  # of the tokens
    dtype: torch.dtype
    head: str
    between: str
    loss: str
    scale: float  # of the loss, outside of the compiled function
    steps: int  # whose gradients are summed
    tokens: int  # of a chunk
    autocast: bool
    dynamic: bool


@dataclass(frozen=True)
class Outcome:
    """`chunked`: a layer is in chunks. `why`: the reasons why one is not. `wrong`: what is wrong; "" if nothing is."""

    case: Case
    chunked: bool
    why: str
    wrong: str
    ratio: float  # the distance of its gradients to float64 over eager mode's


def generate(seed: int) -> Case:
    draw = random.Random(seed)
    shape = draw.choice(((24,), (37,), (2, 15), (3, 8), (1, 29), (2, 1, 12)))
    loss = draw.choice(LOSSES)
    if loss in SEQUENCES:
        shape = draw.choice(((2, 15), (1, 29), (3, 8)))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return Case(
        seed,
        shape,
        dtype,
        draw.choice(HEADS),
        draw.choice(BETWEEN),
        loss,
        draw.choice((1.0, 1.0, 0.25, 0.3, 8.0)),
        draw.choice((1, 1, 2)),
        draw.choice((8, 10, 12)),
        dtype == torch.float32 and draw.random() < 0.2,
        draw.random() < 0.15,
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
        weights = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape).to(loss.dtype)
        (loss * weights).sum().mul(case.scale).backward()
    return losses + [p.grad for p in program.parameters() if p.grad is not None]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / (exact.double().norm() + 1e-9))


def check(case: Case, inner: str = "aten") -> Outcome:
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    torch._dynamo.reset()
    options = {"inner": inner, "chunk": case.tokens, "policy": aot_hooks.KEEP}
    compiled = torch.compile(program, backend="aot_hooks", options=options, dynamic=case.dynamic or None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusedWarning)
        found = _run(program, compiled, case, case.autocast)
    rows = [row for plan in aot_hooks.last_plans(compiled) for row in plan.chunked]
    said = [str(w.message) for w in caught if "options['chunk']" in str(w.message)]
    return _judged(case, program, found, rows, said)


def check_joint(case: Case) -> Outcome:
    """`check` of the pass alone."""
    case = dataclasses.replace(case, dynamic=False, steps=1)
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    state = {name: p.detach() for name, p in program.named_parameters()}
    trained = [name for name, p in program.named_parameters() if p.requires_grad]
    inputs = _inputs(case, 0)

    def joint(state: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], tangent: torch.Tensor) -> Any:
        leaves = {name: p.detach().requires_grad_(name in trained) for name, p in state.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            out = torch.func.functional_call(program, leaves, inputs)
        outs = out if isinstance(out, tuple) else (out,)
        return outs, torch.autograd.grad(outs[0], [leaves[name] for name in trained], tangent, allow_unused=True)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        out = program(*inputs)
    loss = out[0] if isinstance(out, tuple) else out
    tangent = (torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape) * case.scale).to(loss.dtype)
    gm = make_fx(joint, decomposition_table=DECOMPOSED, tracing_mode="fake")(state, inputs, tangent)
    last = gm.graph.find_nodes(op="placeholder")[-1]
    last.name = last.target = "tangents_1"  # AOTAutograd's name
    gm.recompile()
    chunks, rows = chunked(gm, case.tokens)
    outs, gradients = chunks(state, inputs, tangent)
    found = [o.detach() for o in outs] + [g for g in gradients if g is not None]
    return _judged(case, program, found, rows, [])


def _judged(case: Case, program: Program, found: list[torch.Tensor], rows: Any, said: list[str]) -> Outcome:
    program.zero_grad()
    exact = _run(wide := copy.deepcopy(program).double(), wide, case, False)
    eager = _run(same := copy.deepcopy(program), same, case, case.autocast)
    done = any(row.done for row in rows)
    wrong = ""
    if len(found) != len(exact):
        wrong = f"{len(found)} results, expected {len(exact)}"
    eps = EPS[torch.bfloat16 if case.autocast else case.dtype]
    total = [0.0, 0.0]
    for i, (a, b, c) in enumerate(zip(found, eager, exact, strict=False)):
        mine, theirs = distance(a, c), distance(b, c)
        if i >= len(exact) - sum(p.requires_grad for p in program.parameters()):
            total[0], total[1] = total[0] + mine, total[1] + theirs
        if not mine <= 1.5 * theirs + eps / 2:  # two or three roundings: biases are sums of eight rounded numbers
            wrong = wrong or f"result {i}: {mine:.2e} from float64, eager mode {theirs:.2e}"
    worst = total[0] / total[1] if total[1] else 1.0
    if not rows and not said:
        wrong = wrong or "left alone without a reason"
    if done == (case.loss in ALONE):
        wrong = wrong or f"{'in chunks' if done else 'left alone'}, expected otherwise"
    return Outcome(case, done, "; ".join(str(r) for r in rows if not r.done) or "; ".join(said), wrong, worst)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--inner", default="aten")
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--out", help="a file for the result")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    outcomes = []
    for seed in range(options.first, options.first + options.count):
        case = generate(seed)
        try:
            outcome = check_joint(case) if options.joint else check(case, options.inner)
        except Exception as e:
            outcome = Outcome(case, False, "", f"{type(e).__name__}: {str(e)[:300]}", 1.0)
        outcomes.append(outcome)
        if outcome.wrong or options.verbose:
            print(outcome, flush=True)
    found = summary(outcomes, options.first)
    print(json.dumps(found, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


def summary(outcomes: list[Outcome], first: int) -> dict[str, Any]:
    done = [o for o in outcomes if o.chunked]
    ratios = sorted(o.ratio for o in done)
    return {
        "first": first,
        "programs": len(outcomes),
        "in_chunks": len(done),
        "left_alone": len(outcomes) - len(done),
        "failing_seeds": [o.case.seed for o in outcomes if o.wrong],
        "distance_to_float64_over_eager": {
            "median": round(ratios[len(ratios) // 2], 3) if ratios else None,
            "most": round(max(ratios, default=0), 3),
        },
        "by_loss": {
            loss: [sum(o.chunked for o in each), len(each)]
            for loss in sorted(set(LOSSES))
            if (each := [o for o in outcomes if o.case.loss == loss])
        },
    }


if __name__ == "__main__":
    main()
