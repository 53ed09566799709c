"""A small mixture of experts on real text: losses, the experts' loads and the routers' gradients, beside stock.

    python benchmarks/bench_moe.py --json FILE

    bytes of the standard library ---> 300 steps of the same weights and batches ---> stock and hooks: losses, loads
                                       weights of stock at some steps           ---> gradients of routers, hooks / stock

`for routers`: int8 in place of float8 for what the gradient of a router is computed from.

Each layer normalizes the scores of the chosen experts, and the loss has the load-balancing and the z-loss
(Fedus et al. 2022, Zoph et al. 2022). Experts are dropless: `grouped_mm` over tokens sorted by expert.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from measure import ROOT, conditions, parser_of
from torch import Tensor, nn

import aot_hooks
from aot_hooks import policies

sys.path.append(str(ROOT / "examples"))
from train_gpt import read_corpus

WIDTH, HEADS, LAYERS, EXPERTS, CHOSEN, HIDDEN = 64, 4, 2, 8, 2, 64
BATCH, TOKENS, STEPS = 8, 64, 300
BALANCE, Z = 0.01, 0.001  # shares of the two router losses
FOR_ROUTERS = policies.first_match(
    # results of norms, as the input of a router; results and hidden rows of experts; the sums that norms read
    policies.only_these_ops(dict.fromkeys(("aten.mul", "aten._grouped_mm", "aten.add"), aot_hooks.int8())),
    aot_hooks.float8(),
)
HOOKS = {
    "stock": aot_hooks.KEEP,
    "float8": aot_hooks.float8(),
    "for routers": FOR_ROUTERS,
    "int8": aot_hooks.int8(),
}
COMPARED_AT = (0, 100, 200, 300)  # steps at which the gradients of the routers are compared
CORPUS_BYTES = 1 << 21
LAST = 50  # steps over which losses and loads are averaged at the end


class Experts(nn.Module):
    """A router and its experts. Returns the output, the router's losses and the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(h)
        p = logits.softmax(-1)
        score, expert = p.topk(CHOSEN)
        score = score / score.sum(-1, keepdim=True)
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // CHOSEN
        load = F.one_hot(flat, EXPERTS).sum(0)
        ends = load.cumsum(0).to(torch.int32)
        x = h.bfloat16()[token]  # compiled, grouped_mm takes no other dtype
        gate, up, down = (w.bfloat16() for w in (self.gate, self.up, self.down))
        y = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
        y = F.grouped_mm(y, down, offs=ends) * score.reshape(-1)[order][:, None]
        balance = EXPERTS * (load / flat.numel() * p.mean(0)).sum()
        losses = BALANCE * balance + Z * logits.logsumexp(-1).square().mean()
        return torch.zeros_like(h).index_add(0, token, y.to(h.dtype)), losses, load


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, losses, load = self.experts(self.norm2(h).flatten(0, 1))
        return h + y.view_as(h), losses, load


class Model(nn.Module):
    """Bytes in; the loss with the routers' losses, the loss of the text, and the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.embed(text[:, :-1]) + self.place.weight
        losses, loads = torch.zeros((), device=h.device), []
        for layer in self.layers:
            h, more, load = layer(h)
            losses, loads = losses + more, [*loads, load]
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), text[:, 1:].flatten())
        return loss + losses, loss.detach(), torch.stack(loads)


def batches(steps: int) -> Tensor:
    """Windows of the corpus, uint8 [steps, batch, tokens + 1] as int64."""
    corpus = read_corpus(CORPUS_BYTES)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(corpus) - TOKENS - 1, (steps, BATCH), generator=generator)
    return corpus[starts[..., None] + torch.arange(TOKENS + 1)].long()


def gradients(model: Model, compiled: Any, text: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    compiled(text)[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], exact: dict[str, Tensor], part: str) -> float:
    names = [name for name in exact if part in name]
    off = sum(float((found[n] - exact[n]).square().sum()) for n in names)
    return (off / sum(float(exact[n].square().sum()) for n in names)) ** 0.5


def run(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    first = Model()
    models = {name: copy.deepcopy(first) for name in HOOKS}
    compiled = {
        name: torch.compile(models[name], backend="aot_hooks", options={"inner": "aten", "policy": hook})
        for name, hook in HOOKS.items()
    }
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=3e-3) for name, m in models.items()}
    text = batches(steps + 1)
    losses: dict[str, list[float]] = {name: [] for name in HOOKS}
    loads: dict[str, list[Tensor]] = {name: [] for name in HOOKS}
    errors: dict[str, dict[int, dict[str, float]]] = {name: {} for name in HOOKS if name != "stock"}
    for step in range(steps + 1):
        if step in COMPARED_AT:
            own = {name: copy.deepcopy(models[name].state_dict()) for name in HOOKS}
            exact = gradients(models["stock"], compiled["stock"], text[step])
            for name in errors:
                models[name].load_state_dict(own["stock"])
                found = gradients(models[name], compiled[name], text[step])
                models[name].load_state_dict(own[name])
                errors[name][step] = {"routers": error(found, exact, "router"), "all": error(found, exact, "")}
        for name, model in models.items():
            model.zero_grad()
            loss, of_text, load = compiled[name](text[step])
            loss.backward()
            optimizers[name].step()
            losses[name].append(float(of_text))
            loads[name].append(load)
    bytes_of = {name: aot_hooks.last_plans(fn) for name, fn in compiled.items()}
    return {
        "losses": {name: [round(x, 4) for x in each] for name, each in losses.items()},
        "last_loss": {name: sum(each[-LAST:]) / LAST for name, each in losses.items()},
        "loads": {name: _shares(each).tolist() for name, each in loads.items()},
        "load_difference": {
            n: float((_shares(loads[n]) - _shares(loads["stock"])).abs().sum(-1).max() / 2) for n in loads
        },
        "gradient_errors": errors,
        "packed_share": {
            n: sum(p.packed_bytes for p in plans) / sum(p.saved_bytes for p in plans) for n, plans in bytes_of.items()
        },
        "graphs": {name: len(plans) for name, plans in bytes_of.items()},
    }


def _shares(loads: list[Tensor]) -> Tensor:
    """Each expert's share of the tokens over the last steps, f32[layers, experts]."""
    total = torch.stack(loads[-LAST:]).sum(0).float()
    return total / total.sum(-1, keepdim=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    result = run(arguments.steps)
    header = conditions(torch.device("cpu"), steps=arguments.steps, batch=BATCH, tokens=TOKENS, experts=EXPERTS)
    for name in HOOKS:
        print(
            f"{name:11} loss {result['last_loss'][name]:.4f}, load off by {result['load_difference'][name]:.4f}", end=""
        )
        print(f", gradients {result['gradient_errors'].get(name, 'exact')}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"header": header, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
