"""Save fewer bytes for backward and change no bit: a convolutional network with `aot_hooks.lossless()`.

conv - batch norm - ReLU - max pool - conv - ReLU6 - average pool - linear - leaky ReLU - dropout - linear
    |
    |  the same weights, batches and dropout, 3 steps
    v
torch.compile(net, backend="aot_hooks")                                  gradients, bytes saved
torch.compile(net, backend="aot_hooks", policy=aot_hooks.lossless())     the same gradients, fewer bytes

python examples/lossless_relu.py                     # AOTAutograd's graphs as they are, seconds
python examples/lossless_relu.py --inner inductor    # compiled by Inductor
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

import aot_hooks
from aot_hooks import Plan


def network() -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU6(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(512, 128), nn.LeakyReLU(), nn.Dropout(0.5), nn.Linear(128, 10))


def train(inner: str, policy: Any, steps: int) -> tuple[list[Tensor], Plan]:
    """All gradients of `steps` steps, and what was decided for the saved tensors."""
    net = network()
    compiled = torch.compile(net, backend="aot_hooks", options={"inner": inner, "policy": policy or aot_hooks.KEEP})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients = []
    for step in range(steps):
        torch.manual_seed(step)
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        nn.functional.cross_entropy(compiled(images), labels).backward()
        gradients += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    (plan,) = aot_hooks.last_plans(compiled)
    return gradients, plan


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", choices=["aten", "inductor"], default="aten")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    expected, _ = train(args.inner, None, args.steps)
    got, plan = train(args.inner, aot_hooks.lossless(), args.steps)

    saved: dict[str, int] = defaultdict(int)
    packed: dict[str, int] = defaultdict(int)
    for decision in plan.decisions:
        kind = decision.hook.name if decision.hook is not aot_hooks.KEEP else "stays"
        saved[kind] += decision.saved_bytes
        packed[kind] += decision.packed_bytes
    print(f"{'saved for backward':32} {'KiB':>10} {'lossless':>10}")
    for kind in sorted(saved, key=saved.__getitem__, reverse=True):
        print(f"{kind:32} {saved[kind] / 1024:10.1f} {packed[kind] / 1024:10.1f}")
    print(f"{'all':32} {plan.saved_bytes / 1024:10.1f} {plan.packed_bytes / 1024:10.1f}")

    equal = sum(map(same_bits, got, expected))
    print(f"{equal} of {len(expected)} gradients are equal to the last bit")
    if equal != len(expected):
        raise SystemExit("gradients differ")


if __name__ == "__main__":
    main()
