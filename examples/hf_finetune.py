"""Train a Hugging Face model with its saved activations stored smaller; two lines change, none of them in the model.

    transformers' own GPT-2, Llama, BERT, T5 or ViT, random weights from a config: nothing is downloaded
        |  the same weights, batches and dropout
        v
    torch.compile(model)                          losses, gradients, graphs        stock
    torch.compile(model, backend="aot_hooks")     losses, gradients, graphs        hooks
        with aot_hooks.saved_tensors_policy(...)  bytes saved, before and after
        |
        v
    a table; fails if the hooks break the graph where stock does not, or if a gradient is wrong

Text is the standard library's source, a byte a token, in rows that are padded and masked; images are noise over a
pattern for each class. GPT-2's embedding is its head too, T5 has cross attention and a learned bias of it.

    python examples/hf_finetune.py --model gpt2
    python examples/hf_finetune.py --model t5 --policy lossless      # the gradients of stock, to the last bit
    python examples/hf_finetune.py --model llama --device cuda --setting full
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import aot_hooks
from aot_hooks import policies

Batch = dict[str, Tensor]
PAD, MASK, VOCABULARY = 0, 256, 260  # bytes are tokens 0 to 255; 0 does not occur in source
IGNORED = -100  # transformers' label for "no loss here"


@dataclasses.dataclass(frozen=True)
class Setting:
    layer_count: int
    width: int
    head_count: int
    sequence: int
    image: int
    patch: int
    batch: int
    step_count: int


SETTINGS = {
    "small": Setting(2, 64, 4, 64, 32, 8, 8, 20),
    "full": Setting(12, 768, 12, 512, 224, 16, 32, 100),
}

# policy -> how to make it, and how far the gradient may be off: 0 is bitwise
POLICIES: dict[str, tuple[Callable[[], Any], float]] = {
    "float8": (lambda: policies.first_match(aot_hooks.lossless(), aot_hooks.float8()), 0.1),
    "int8": (lambda: policies.first_match(aot_hooks.lossless(), aot_hooks.int8()), 0.1),
    "lossless": (aot_hooks.lossless, 0.0),
}

# ------------------------------------------------------------------------------------------------------- models, data


def make_gpt2(transformers: Any, s: Setting) -> nn.Module:
    sizes = {"n_embd": s.width, "n_layer": s.layer_count, "n_head": s.head_count, "n_positions": s.sequence}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes)
    return transformers.GPT2LMHeadModel(config)


def make_llama(transformers: Any, s: Setting) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=s.width,
        intermediate_size=s.width * 8 // 3,
        num_hidden_layers=s.layer_count,
        num_attention_heads=s.head_count,
        num_key_value_heads=s.head_count // 2,
        max_position_embeddings=s.sequence,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def make_bert(transformers: Any, s: Setting) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=s.width,
        num_hidden_layers=s.layer_count,
        num_attention_heads=s.head_count,
        intermediate_size=4 * s.width,
        max_position_embeddings=s.sequence,
    )
    return transformers.BertForMaskedLM(config)


def make_t5(transformers: Any, s: Setting) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=s.width,
        d_kv=s.width // s.head_count,
        d_ff=4 * s.width,
        num_layers=s.layer_count,
        num_heads=s.head_count,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_vit(transformers: Any, s: Setting) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=s.width,
        num_hidden_layers=s.layer_count,
        num_attention_heads=s.head_count,
        intermediate_size=4 * s.width,
        image_size=s.image,
        patch_size=s.patch,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config).to(memory_format=torch.channels_last)


def read_corpus(byte_count: int) -> Tensor:
    """The first `byte_count` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= byte_count:
            break
    return torch.frombuffer(text[:byte_count], dtype=torch.uint8)


def draw_rows(corpus: Tensor, s: Setting, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [batch, sequence], and a mask of them: 1 where there is text, 0 where a row was filled up."""
    starts = torch.randint(len(corpus) - s.sequence, (s.batch, 1), generator=generator)
    tokens = corpus[starts + torch.arange(s.sequence)].long()
    lengths = torch.randint(s.sequence // 2, s.sequence + 1, (s.batch, 1), generator=generator)
    mask = (torch.arange(s.sequence) < lengths).long()
    return tokens * mask + PAD * (1 - mask), mask


def causal_batch(corpus: Tensor, s: Setting, generator: torch.Generator) -> Batch:
    tokens, mask = draw_rows(corpus, s, generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def masked_batch(corpus: Tensor, s: Setting, generator: torch.Generator) -> Batch:
    tokens, mask = draw_rows(corpus, s, generator)
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.15) & (mask == 1)
    labels = tokens.masked_fill(~hidden, IGNORED)
    return {"input_ids": tokens.masked_fill(hidden, MASK), "attention_mask": mask, "labels": labels}


def translation_batch(corpus: Tensor, s: Setting, generator: torch.Generator) -> Batch:
    """The encoder reads a row, the decoder writes its second half."""
    tokens, mask = draw_rows(corpus, s, generator)
    labels = tokens.masked_fill(mask == 0, IGNORED)[:, s.sequence // 2 - 1 :].contiguous()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def image_batch(corpus: Tensor, s: Setting, generator: torch.Generator) -> Batch:
    labels = torch.randint(10, (s.batch,), generator=generator)
    patterns = torch.randn(10, 3, s.image, s.image, generator=torch.Generator().manual_seed(1))
    images = patterns[labels] + torch.randn(s.batch, 3, s.image, s.image, generator=generator)
    return {"pixel_values": images.contiguous(memory_format=torch.channels_last), "labels": labels}


MODELS = {
    "gpt2": (make_gpt2, causal_batch),
    "llama": (make_llama, causal_batch),
    "bert": (make_bert, masked_batch),
    "t5": (make_t5, translation_batch),
    "vit": (make_vit, image_batch),
}

# ----------------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass
class Run:
    """One training. `forward(batch)` is the loss of the compiled model; `gradients` are those of its first step."""

    model: nn.Module
    compiled: Callable[..., Any]
    forward: Callable[[Batch], Tensor]
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def stock(model: nn.Module, inner: str) -> Run:
    # with "fallback_random" Inductor draws dropout as eager does, so that both runs drop the same
    how: Any = {"backend": "aot_eager"} if inner == "aten" else {"options": {"fallback_random": True}}
    compiled = torch.compile(model, **how)

    def forward(batch: Batch) -> Tensor:
        loss: Tensor = compiled(**batch).loss
        return loss

    return Run(model, compiled, forward)


def hooks(model: nn.Module, inner: str, policy: Any) -> Run:
    options = {"inner": inner} | ({"inductor": {"fallback_random": True}} if inner == "inductor" else {})
    compiled = torch.compile(model, backend="aot_hooks", options=options)  # <- changed: the backend

    def forward(batch: Batch) -> Tensor:
        with aot_hooks.saved_tensors_policy(policy):  # <- changed: how saved tensors are stored
            loss: Tensor = compiled(**batch).loss
        return loss

    return Run(model, compiled, forward)


def train(run: Run, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):
        torch.manual_seed(step)  # of dropout
        started = time.perf_counter()
        loss = run.forward(batch)
        loss.backward()
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
        run.step_ms.append((time.perf_counter() - started) * 1e3)


def count_graphs(model: nn.Module, batch: Batch, backend: Callable[..., Any], policy: Any) -> int:
    """How many graphs Dynamo makes of one forward; each break makes one more."""
    counted = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal counted
        counted += 1
        return backend(graph, inputs)

    torch.compiler.reset()
    with contextlib.nullcontext() if policy is None else aot_hooks.saved_tensors_policy(policy):
        torch.compile(model, backend=counting)(**batch)
    return counted


def our_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="aot_hooks")
    compiled: Callable[..., Any] = entry.load()(graph, inputs, options={"inner": "aten"})
    return compiled


def gradient_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """|found - exact| / |exact| over all parameters together: some, such as the keys' biases, have none to speak of."""
    if found.keys() != exact.keys():
        raise AssertionError(f"only one run has gradients of {sorted(found.keys() ^ exact.keys())}")
    off = sum(float((found[name].double() - g.double()).square().sum()) for name, g in exact.items())
    return float((off / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5)


# --------------------------------------------------------------------------------------------------------------- main


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        sys.exit("this example trains models of the transformers package: pip install 'aot-hooks[hf]'")
    transformers.logging.set_verbosity_error()
    return transformers


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model with packed saved tensors.")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--policy", choices=POLICIES, default="float8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--setting", choices=SETTINGS, help="default: full on CUDA, small elsewhere")
    parser.add_argument("--inner", choices=("inductor", "aten"), help="default: inductor on CUDA, aten elsewhere")
    parser.add_argument("--steps", type=int, help="default: the setting's")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    transformers = load_transformers()
    device = torch.device(options.device)
    setting = SETTINGS[options.setting or ("full" if device.type == "cuda" else "small")]
    inner = options.inner or ("inductor" if device.type == "cuda" else "aten")
    make_policy, tolerance = POLICIES[options.policy]
    make_model, draw_batch = MODELS[options.model]
    policy = make_policy()

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = make_model(transformers, setting).to(device).train()
        return made

    def batches(count: int) -> Iterator[Batch]:
        generator, corpus = torch.Generator().manual_seed(0), read_corpus(1 << 20)
        for _ in range(count):
            yield {name: x.to(device) for name, x in draw_batch(corpus, setting, generator).items()}

    data = list(batches(options.steps or setting.step_count))
    runs = [stock(model(), inner), hooks(model(), inner, policy)]
    for run in runs:
        train(run, data)
    plain, packed = runs
    plans = aot_hooks.last_plans(packed.compiled)
    saved, kept = sum(plan.saved_bytes for plan in plans), sum(plan.packed_bytes for plan in plans)
    error = gradient_error(packed.gradients, plain.gradients)
    bitwise = all(torch.equal(packed.gradients[name], g) for name, g in plain.gradients.items())
    graphs = [
        count_graphs(model(), data[0], lambda graph, inputs: graph.forward, None),
        count_graphs(model(), data[0], our_backend, policy),
    ]

    rows = [
        ("saved for backward, MiB", f"{saved / 2**20:.2f}", f"{kept / 2**20:.2f}"),
        ("first loss", f"{plain.losses[0]:.4f}", f"{packed.losses[0]:.4f}"),
        ("last loss", f"{plain.losses[-1]:.4f}", f"{packed.losses[-1]:.4f}"),
        ("gradient error, first step", "", "0, bitwise" if bitwise else f"{error:.4f}"),
        ("a step, median, ms", *(f"{statistics.median(run.step_ms[1:] or run.step_ms):.1f}" for run in runs)),
        ("graphs", *map(str, graphs)),
    ]
    count = sum(p.numel() for p in plain.model.parameters())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {device}, inner {inner}")
    print(f"{type(plain.model).__name__}, {count / 1e6:.2f}M parameters, {len(data)} steps, policy {options.policy}\n")
    print(f"{'':28}{'stock':>12}{'hooks':>12}")
    print("\n".join(f"{label:28}{a:>12}{b:>12}" for label, a, b in rows))

    failures = []
    if graphs[1] > graphs[0]:
        failures.append(f"{graphs[1]} graphs with hooks, {graphs[0]} without")
    if not (error <= tolerance and (bitwise or tolerance > 0)):  # "not <=": a NaN fails as well
        failures.append(f"the gradient is {error:.2e} off, more than {tolerance}")
    # Llama has neither dropout nor anything that is only compared: there is nothing to store exactly in fewer bytes
    if kept > saved or (kept == saved and options.policy != "lossless"):
        failures.append(f"nothing became smaller: {saved} bytes saved, {kept} after packing")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
