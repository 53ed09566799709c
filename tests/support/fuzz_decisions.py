"""Random programs that are full of decisions, singular functions and recomputed chains, under every lossy hook.

      python tests/support/fuzz_decisions.py --first 0 --count 5000 --workers 16
      python tests/support/fuzz_decisions.py --first 0 --count 500 --magnitudes 1e-3 1e4     of inputs; else about 1
      python tests/support/fuzz_decisions.py --first 17 --count 1 --shrink        a small program that fails likewise

A program is a list of statements, each of which makes one more [ROWS, COLUMNS] tensor of one or two earlier ones; the
last ones are summed with fixed weights. The rule that its gradients must obey is in oracle.py. A seed that fails is
printed with its program as code.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import linecache
import math
import multiprocessing
import pathlib
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from oracle import EAGER_LOST, HOOKS, Verdict, compare, format_failures

__all__ = ["Program", "check", "generate", "shrink"]

ROWS, COLUMNS = 16, 32
NO_PROGRAM = "raises_without_hooks"
TIMEOUT = 120  # seconds for one program
PRODUCTS = ("{a} @ w{i} * 0.2", "F.linear({a}, w{i}, bias) * 0.2", "torch.einsum('nd,de->ne', {a}, w{i}) * 0.2")
SMOOTH = (
    "F.gelu({a})",
    "F.silu({a})",
    "{a}.tanh()",
    "{a}.sigmoid() * {b}",
    "F.softplus({a})",
    "{a} * {b}",
    "{a} + 0.5 * {b}",
    "{a} - {b}.mean(1, keepdim=True)",
    "{a}.sin() + {b}",
    "F.layer_norm({a}, (32,), gain, bias)",
    "F.rms_norm({a}, (32,), gain)",
    "F.group_norm({a}, 4, gain, bias)",
    "torch.softmax({a}, -1) * 4",
    "torch.exp(-{a}.square()) * {b}",
    "torch.erf({a})",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {b}, {b}, value=0.1)",
)
DECISIONS = (
    "torch.where({a} > 0.5, {a} * {a}, 0.1 * {a})",
    "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "torch.where({a}.abs() < 0.3, {b}, {a})",
    "{a} * ({a} > {b}).to({a}.dtype)",
    "{a}.clamp(-0.8, 0.8) * {b}",
    "{a}.clamp(min=0.0)",
    "torch.clamp({a}, {b} - 0.5, {b} + 0.5)",
    "F.relu({a}) * {b}",
    "F.leaky_relu({a}, 0.1)",
    "F.hardtanh({a})",
    "F.hardswish({a})",
    "F.hardsigmoid({a}) * {b}",
    "F.relu6({a})",
    "F.threshold({a}, 0.2, 0.0)",
    "F.softshrink({a}, 0.3)",
    "F.elu({a})",
    "F.prelu({a}, slope)",
    "{a} - {a}.amax(1, keepdim=True)",
    "{a} * {a}.amin(0, keepdim=True)",
    "{b} + {a}.amax(0, keepdim=True)",
    "{a}.max(1, keepdim=True).values * {b}",
    "{a}.min(0, keepdim=True).values + {b}",
    "{a}.median(1, keepdim=True).values * {b}",
    "{a}.kthvalue(3, 1, keepdim=True).values + {b}",
    "{a}.topk(4, 1).values.sum(1, keepdim=True) * {b}",
    "torch.zeros_like({a}).scatter(1, {a}.topk(3, 1).indices, 1.0) * {b}",
    "{a}.sort(1).values * c0",
    "{b}.gather(1, {a}.argsort(1))",
    "{b}.gather(1, {a}.argmax(1, keepdim=True)) + {a}",
    "{b} * {a}.argmax(1, keepdim=True).to({a}.dtype) / 32",
    "F.one_hot({a}.argmax(1), 32).to({a}.dtype) * {b}",
    "straight_through({a}, {a}.round()) * {b}",
    "straight_through({a}, ({a} * 4).floor() / 4) * {b}",
    "straight_through({a}.clamp(-1, 1), {a}.sign()).square()",
    "({a} + ({a}.round() - {a}).detach()) * {b}",
    "{a}.round() * {b}",
    "{a}.floor() * {b} * 0.3",
    "({a} * 2).ceil() * {b} * 0.2",
    "{a}.trunc() + {b} * {a}.frac()",
    "torch.remainder({a}, 1.0) * {b}",
    "{a}.sign() * {b}",
    "torch.copysign({a}, {b})",
    "{a}.abs() * {b}",
    "{a}.masked_fill({b} > 0.7, 0.0)",
    "{a} * ({b} < 0) + {b} * ({a} >= 0)",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b} * 2)",
    "torch.fmax({a}, {b})",
    "{a}.cummax(1).values",
    "{a}.cummin(0).values * {b}",
    "F.max_pool1d({a}.unsqueeze(1), 2).squeeze(1).repeat_interleave(2, 1)",
    "F.max_pool2d({a}.view(1, 1, 16, 32), 2).view(8, 16).repeat(2, 2) * {b}",
    "F.adaptive_max_pool1d({a}.unsqueeze(0), 4).squeeze(0).repeat(1, 8) + {b}",
    "{a} / {a}.abs().max()",
    "{a} / ({a}.abs().amax(1, keepdim=True) + 0.1)",
    "fake_quantize({a}) * {b}",
    "F.smooth_l1_loss({a}, {b}, reduction='none')",
    "F.huber_loss({a}, {b}, reduction='none', delta=0.5)",
    "(1 - {a} * {b}).clamp(min=0.0)",
    "{a} * (torch.bucketize({b}, edges) - 2).to({a}.dtype)",
    "{a} - {a}.amin(1, keepdim=True)",
    "{a} * {b}.isclose({b}.round(), atol=0.1).to({a}.dtype)",
    "{a}.renorm(2, 0, 3.0)",
    "{a}.scatter_reduce(1, index, {b}, 'amax')",
)
SINGULAR = (
    "torch.softmax({a}, -1).log() * 0.2",
    "F.log_softmax({a}, -1) * 0.2",
    "F.log_softmax({a}, 0).exp() * {b}",
    "F.kl_div(F.log_softmax({a}, -1), torch.softmax({b}, -1), reduction='none') * 4",
    "F.kl_div(F.log_softmax({a}, -1), F.log_softmax({b}, -1), reduction='none', log_target=True) * 4",
    "torch.softmax({a}, -1) * torch.softmax({a}, -1).log() + {b}",
    "{a}.logsumexp(1, keepdim=True) * {b} * 0.3",
    "{a} - {a}.logsumexp(0, keepdim=True)",
    "torch.logaddexp({a}, {b})",
    "{a}.logcumsumexp(1) * 0.3",
    "({a}.square() + 0.1).sqrt()",
    "({a}.square().mean(1, keepdim=True) + 0.01).rsqrt() * {b}",
    "({a}.abs() + 0.1).log()",
    "{a}.abs().add(0.01).pow(0.5) * {b}",
    "{a}.abs().pow(1.5)",
    "{b} / (1 + {a}.abs())",
    "{a} / ({b}.square() + 0.2)",
    "(-{a}).exp().add(1).reciprocal() * {b}",
    "{a}.exp().clamp(max=4.0)",
    "torch.linalg.vector_norm({a}, ord=float('inf'), dim=1, keepdim=True) + {b}",
    "{a} / (torch.linalg.vector_norm({a}, ord=1, dim=1, keepdim=True) + 0.1) * 8",
    "F.normalize({a}, dim=1) * 4",
    "{a} / ({a}.norm(dim=0, keepdim=True) + 0.1) * 3",
    "{a} - {a}.mean(1, keepdim=True) / ({a}.std(1, keepdim=True) + 0.1)",
    "{b} * F.cosine_similarity({a}, {b}, dim=1).unsqueeze(1)",
    "{a}.sigmoid().cumprod(1) * {b}",
    "{a}.sigmoid().logit() * 0.5",
    "{a}.sigmoid().prod(1, keepdim=True) + {b}",
    "F.binary_cross_entropy({a}.sigmoid(), {b}.sigmoid(), reduction='none')",
    "F.binary_cross_entropy_with_logits({a}, {b}.sigmoid(), reduction='none')",
    "torch.atan2({a}, {b}.abs() + 0.2)",
    "torch.hypot({a}, {b} + 0.1)",
    "torch.acos({a}.tanh() * 0.9)",
    "torch.xlogy({a}, {b}.abs() + 0.1)",
)
MOVES = (
    "{a}.cumsum(1) * 0.3",
    "{a}[:, permutation] * {b}",
    "{a}.index_select(0, rows) + {b}",
    "torch.zeros_like({a}).scatter(1, index, {b}) + {a}",
    "torch.zeros_like({a}).scatter_add(1, index, {a}) * {b}",
    "{a}.index_add(0, rows, {b})",
    "{a}.gather(1, index) * {b}",
    "{a} * mask / 0.8",
    "torch.where(mask, {a}, {b})",
    "{a}.masked_fill(mask, -1.0)",
    "{a}.roll(1, 1) * {b}",
    "{a}.flip(0) + {b}",
    "torch.cat([{a}[:, :16], {b}[:, 16:]], 1)",
    "{a}.view(16, 4, 8).transpose(1, 2).reshape(16, 32) * {b}",
    "{a}.tril() + {b}",
)
KINDS = ((PRODUCTS, 3), (SMOOTH, 5), (DECISIONS, 8), (SINGULAR, 4), (MOVES, 2))
NAMES = (
    "x", "w0", "w1", "w2", "gain", "bias", "slope", "mask", "index", "permutation", "rows", "edges", "c0", "c1", "c2"
)  # fmt: skip
TENSOR = re.compile(r"\bv(\d+)\b")
TRAINED = 7  # of them, the first ones


def straight_through(soft: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
    """`hard`, with the gradient of `soft`. Under `no_grad`, not by `detach`, which the partitioner never recomputes."""
    with torch.no_grad():
        difference = hard - soft
    return soft + difference


def fake_quantize(a: torch.Tensor) -> torch.Tensor:
    """4 bits with one scale, straight through."""
    scale = a.detach().abs().max() / 7
    return straight_through(a, (a / scale).round().clamp(-7, 7) * scale)


@dataclasses.dataclass(frozen=True)
class Program:
    """Attributes:
    statements: each the number of the tensor that it makes anew if it is dropped, and its expression.
    results: numbers of the tensors that are summed.
    magnitude: what the random input is multiplied with.
    """

    seed: int
    dtype: torch.dtype
    statements: tuple[tuple[int, str], ...]
    results: tuple[int, ...]
    magnitude: float = 1.0

    @property
    def code(self) -> str:
        real = {0: 0}  # what a dropped statement's tensor is
        lines = [f"def program({', '.join(NAMES)}):", "    v0 = x @ w0 * 0.2"]

        def name(match: re.Match[str]) -> str:
            return f"v{real[int(match[1])]}"

        for k, (instead, expression) in enumerate(self.statements, 1):
            real[k] = real[instead] if expression == f"v{instead}" else k
            if real[k] == k:
                lines.append(f"    v{k} = {re.sub(TENSOR, name, expression)}")
        terms = [f"(v{real[k]} * c{i}).sum()" for i, k in enumerate(self.results)]
        return "\n".join([*lines, f"    return {' + '.join(terms)}"]) + "\n"

    def function(self) -> Callable[..., torch.Tensor]:
        name = f"<program {self.seed}, {hash(self.code) & 0xFFFFFF:x}>"
        linecache.cache[name] = (len(self.code), None, self.code.splitlines(keepends=True), name)
        made: dict[str, Any] = {"torch": torch, "F": F, "fake_quantize": fake_quantize}
        made["straight_through"] = straight_through
        exec(compile(self.code, name, "exec"), made)
        return made["program"]  # type: ignore[no-any-return]

    def inputs(self) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        randn = functools.partial(torch.randn, generator=g)
        floats = [
            randn(ROWS, COLUMNS) * self.magnitude,
            *(randn(COLUMNS, COLUMNS) for _ in range(3)),
            1 + 0.1 * randn(COLUMNS),
            0.1 * randn(COLUMNS),
            torch.full((1,), 0.25),
        ]
        mask = torch.rand(ROWS, COLUMNS, generator=g) < 0.8
        index = torch.randint(COLUMNS, (ROWS, COLUMNS), generator=g)
        permutation, rows = torch.randperm(COLUMNS, generator=g), torch.randint(ROWS, (ROWS,), generator=g)
        edges = torch.tensor([-1.0, -0.25, 0.25, 1.0]).to(self.dtype)
        weights = [randn(ROWS, COLUMNS).to(self.dtype) for _ in range(3)]
        trained = [a.to(self.dtype).requires_grad_() for a in floats]
        return [*trained, mask, index, permutation, rows, edges, *weights]

    def without(self, number: int) -> Program:
        """The program with the statement of tensor `number` dropped."""
        statements = list(self.statements)
        instead, _ = statements[number - 1]
        statements[number - 1] = (instead, f"v{instead}")
        return dataclasses.replace(self, statements=tuple(statements))

    @property
    def length(self) -> int:
        return sum(expression != f"v{instead}" for instead, expression in self.statements)


def generate(
    seed: int,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32, torch.bfloat16),
    magnitudes: tuple[float, float] = (1.0, 1.0),
) -> Program:
    """The program of `seed`, on inputs of a size from the smaller of `magnitudes` to the larger."""
    choose = random.Random(seed)
    dtype = choose.choice(dtypes)
    statements = []
    count = choose.randint(2, 9)
    for k in range(1, count + 1):
        (templates,) = choose.choices([t for t, _ in KINDS], [w for _, w in KINDS])
        # mostly the newest tensor: chains are what a backward computes again
        a = k - 1 if choose.random() < 0.75 else choose.randrange(k)
        b = choose.randrange(k)
        expression = choose.choice(templates).format(a=f"v{a}", b=f"v{b}", i=choose.randrange(3))
        statements.append((a, expression))
    results = [count, *choose.sample(range(count), min(count, choose.randint(0, 2)))]
    low, high = map(math.log, magnitudes)
    magnitude = math.exp(random.Random(seed + 1).uniform(low, high))
    return Program(seed, dtype, tuple(statements), tuple(results), magnitude)


def check(program: Program, inner: str = "aten", hooks: Sequence[str] = tuple(HOOKS)) -> list[Verdict]:
    """What the oracle says of `program`; empty if no gradient without hooks is finite."""
    inputs = program.inputs()
    usable = [hook for hook in hooks if hook != "cast" or program.dtype is torch.float32]
    verdicts, _ = compare(program.function(), inputs, inputs[:TRAINED], usable, inner=inner)
    return verdicts


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """`program` with every statement and result dropped without which it still `fails`."""
    shrunk = True
    while shrunk:
        shrunk = False
        smaller = [dataclasses.replace(program, results=(k,)) for k in program.results if len(program.results) > 1]
        numbers = range(len(program.statements), 0, -1)
        for other in [*smaller, *(program.without(k) for k in numbers)]:
            if (other.length, len(other.results)) < (program.length, len(program.results)) and fails(other):
                program, shrunk = other, True
                break
    return program


def run_seed(seed: int, inner: str, shrinks: bool, magnitudes: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    """What the program of `seed` gave, for a person and as JSON."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {TIMEOUT} s")

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT * (20 if shrinks else 1))
    dtypes = (torch.float32,) if inner == "inductor" else (torch.float32, torch.float32, torch.bfloat16)
    program = generate(seed, dtypes, magnitudes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdicts = check(program, inner)
            if shrinks and (failing := [v.hook for v in verdicts if not v.ok]):

                def fails(other: Program) -> bool:
                    try:
                        return any(not v.ok for v in check(other, inner, failing))
                    except RuntimeError:
                        return False

                program = shrink(program, fails)
                verdicts = check(program, inner)
    except Exception as e:
        kind = NO_PROGRAM if raises_without_hooks(program) else "raises"
        text = f"{type(e).__name__}: {e}\n{program.code}"
        return {"seed": seed, "ok": kind == NO_PROGRAM, "kinds": [kind], "text": text}
    finally:
        signal.alarm(0)
    ok = all(v.ok for v in verdicts)
    text = "" if ok else f"{program.dtype}, {program.magnitude:.3g}\n{program.code}{format_failures(verdicts)}"
    packed = sum(v.packed_count for v in verdicts)
    return {"seed": seed, "ok": ok, "kinds": sorted({v.kind for v in verdicts}), "packed": packed, "text": text}


def raises_without_hooks(program: Program) -> bool:
    """Whether the program itself raises, in eager mode: a loss of numbers that are not finite does, say."""
    try:
        program.function()(*program.inputs())
    except Exception:
        return True
    return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--inner", choices=["aten", "inductor"], default="aten")
    parser.add_argument("--magnitudes", type=float, nargs=2, default=(1.0, 1.0), help="of the inputs: from, to")
    parser.add_argument("--out", type=pathlib.Path, help="write counts and the failing seeds here, as JSON")
    parser.add_argument("--shrink", action="store_true", help="print a small program in place of each that fails")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.count)
    magnitudes = tuple(options.magnitudes)
    one = functools.partial(run_seed, inner=options.inner, shrinks=options.shrink, magnitudes=magnitudes)
    counts = {"programs": 0, "failed": 0, "with_something_packed": 0, "worse_where_eager_is_lost": 0, NO_PROGRAM: 0}
    failing = []
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=200) as pool:
        for result in pool.imap_unordered(one, seeds):
            counts["programs"] += 1
            counts["failed"] += not result["ok"]
            counts["with_something_packed"] += bool(result.get("packed"))
            counts["worse_where_eager_is_lost"] += EAGER_LOST in result["kinds"]
            counts[NO_PROGRAM] += NO_PROGRAM in result["kinds"]
            if not result["ok"]:
                failing.append(result["seed"])
                print(f"seed {result['seed']}: {', '.join(result['kinds'])}\n{result['text']}\n", flush=True)
        pool.close()
        pool.join()
    found = counts | {
        "first": options.first,
        "inner": options.inner,
        "magnitudes": magnitudes,
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found | {"failing_seeds": sorted(failing)}, indent=1) + "\n")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
