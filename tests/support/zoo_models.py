"""Forty-nine architectures of transformers, diffusers, timm, peft and torch-geometric, small and with random weights.

    MODELS[name]() -> Work(module, inputs)        work.loss(compiled) is a scalar

The weights and inputs are those of seed 0. Dropout stays as each library has it: runs that are compared start from one
random state. What differs between architectures is how a layer is written, so one or two layers of each are enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, BATCH = 64, 128, 2


@dataclasses.dataclass(frozen=True)
class Work:
    """Attributes:
    module: in training mode.
    inputs: its keyword arguments.
    """

    module: nn.Module
    inputs: Mapping[str, Any]

    def loss(self, compiled: Callable[..., Any]) -> Tensor:
        """The loss that the model computes itself, or a weighted sum of its first output."""
        out = compiled(**self.inputs)
        if isinstance(loss := getattr(out, "loss", None), Tensor):
            return loss
        while not isinstance(out, Tensor):
            out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return (out.float() * weights).mean()


def define_torchvision_operators() -> None:
    """Make torchvision importable, which timm needs, also beside a torch without CUDA.

    The wheels of torchvision on package indices are built for CUDA. Beside a CPU build of torch their operators don't
    load, and the import ends at the two that get a fake kernel in any case. No model here calls either.
    """
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _tokens(shape: tuple[int, ...] = (BATCH, TOKENS)) -> Tensor:
    return torch.randint(2, VOCABULARY, shape)


def _language(kind: str, labels: str = "labels", **config: Any) -> Callable[[], Work]:
    """A language model of transformers, by the prefix of its classes, with the labels that are its inputs."""

    def build() -> Work:
        import transformers

        for name in (
            f"{kind}ForCausalLM",
            f"{kind}ForMaskedLM",
            f"{kind}LMHeadModel",
            f"{kind}ForConditionalGeneration",
        ):
            if hasattr(transformers, name):
                break
        small = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        cls = getattr(transformers, name)
        made = cls.config_class(**small | config)
        made.use_cache = False
        ids = _tokens()
        return Work(cls(made).train(), {"input_ids": ids, labels: ids})

    return build


_LAYERS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER_DECODER: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_SIZES: dict[str, Any] = _LAYERS | {
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_GROUPED: dict[str, Any] = _SIZES | {"num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = _GROUPED | {"num_experts_per_tok": 2, "output_router_logits": True}

_FINE_EXPERTS: dict[str, Any] = _EXPERTS | {"moe_intermediate_size": 32}
_SHARED_EXPERTS: dict[str, Any] = _SIZES | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def _transformers(cls: str, inputs: Callable[[], Mapping[str, Any]], **config: Any) -> Callable[[], Work]:
    def build() -> Work:
        import transformers

        made = getattr(transformers, cls)
        return Work(made(made.config_class(**config)).train(), inputs())

    return build


def _pixels(size: int = 32, channels: int = 3) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"pixel_values": torch.randn(BATCH, channels, size, size)}


def _timm(name: str, size: int = 64, **arguments: Any) -> Callable[[], Work]:
    def build() -> Work:
        import timm

        return Work(
            timm.create_model(name, num_classes=10, **arguments).train(), {"x": torch.randn(BATCH, 3, size, size)}
        )

    return build


def _diffusers(cls: str, inputs: Callable[[], Mapping[str, Any]], **config: Any) -> Callable[[], Work]:
    def build() -> Work:
        import diffusers

        return Work(getattr(diffusers, cls)(**config).train(), inputs())

    return build


def _peft(config: str, **arguments: Any) -> Callable[[], Work]:
    def build() -> Work:
        import peft

        work = _language("Llama", **_GROUPED)()
        return Work(peft.get_peft_model(work.module, getattr(peft, config)(**arguments)).train(), work.inputs)

    return build


def _graph(name: str, **arguments: Any) -> Callable[[], Work]:
    def build() -> Work:
        import torch_geometric

        model = getattr(torch_geometric.nn, name)(
            in_channels=16, hidden_channels=32, num_layers=3, out_channels=8, **arguments
        )
        return Work(model.train(), {"x": torch.randn(96, 16), "edge_index": torch.randint(0, 96, (2, 512))})

    return build


def _noise(size: int = 16, channels: int = 4, **more: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    """The inputs of a denoising model: a noisy image, time steps, and what else it takes."""

    def inputs() -> Mapping[str, Any]:
        time = {"timestep": torch.tensor([7, 903])}
        image = {"hidden_states" if "_flat" in more else "sample": torch.randn(BATCH, channels, size, size)}
        return image | time | {k: v() for k, v in more.items() if k != "_flat"}

    return inputs


def _prompt(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, 12, width)


MODELS: dict[str, Callable[[], Work]] = {
    "llama": _language("Llama", **_GROUPED),
    "mistral with a window": _language("Mistral", sliding_window=16, **_GROUPED),
    "qwen3": _language("Qwen3", head_dim=16, **_GROUPED),
    "gemma3": _language("Gemma3", head_dim=16, sliding_window=16, **_GROUPED),
    "phi3": _language("Phi3", **_GROUPED),
    "mixtral": _language("Mixtral", num_local_experts=4, **_EXPERTS),
    "qwen3-moe": _language("Qwen3Moe", num_experts=8, head_dim=16, norm_topk_prob=True, **_FINE_EXPERTS),
    "olmoe": _language("Olmoe", num_experts=8, **_EXPERTS),
    "gpt-oss": _language("GptOss", num_local_experts=8, head_dim=16, sliding_window=16, **_EXPERTS),
    "deepseek-v2": _language("DeepseekV2", n_group=1, topk_method="greedy", **_LATENT_ATTENTION, **_SHARED_EXPERTS),
    "deepseek-v3": _language("DeepseekV3", n_group=2, **_LATENT_ATTENTION, **_SHARED_EXPERTS),
    "glm4-moe": _language("Glm4Moe", n_group=1, head_dim=16, num_key_value_heads=2, **_SHARED_EXPERTS),
    "gpt2": _language("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.1),
    "gpt-neox": _language("GPTNeoX", **_SIZES),
    "opt": _language(
        "OPT",
        ffn_dim=128,
        max_position_embeddings=128,
        word_embed_proj_dim=64,
        **_LAYERS,
    ),
    "bloom": _language("Bloom", hidden_size=64, n_layer=2, n_head=4),
    "falcon": _language("Falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "mamba": _language("Mamba", hidden_size=64, state_size=8, num_hidden_layers=2),
    "bert": _language("Bert", **_SIZES),
    "deberta-v2": _language("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], **_SIZES),
    "t5": _language("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": _language(
        "Bart",
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=128,
        decoder_start_token_id=0,
        **_ENCODER_DECODER,
    ),
    "vit": _transformers("ViTModel", _pixels(), intermediate_size=128, image_size=32, patch_size=8, **_LAYERS),
    "dinov2": _transformers("Dinov2Model", _pixels(28), image_size=28, patch_size=7, **_LAYERS),
    "swin": _transformers(
        "SwinModel",
        _pixels(),
        embed_dim=32,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
        image_size=32,
        patch_size=2,
    ),
    "segformer": _transformers(
        "SegformerModel",
        _pixels(),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[32, 64],
        num_attention_heads=[1, 2],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
    ),
    "whisper": _transformers(
        "WhisperModel",
        lambda: {"input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": _tokens((BATCH, 12))},
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        use_cache=False,
        **_ENCODER_DECODER,
    ),
    "wav2vec2": _transformers(
        "Wav2Vec2Model",
        lambda: {"input_values": torch.randn(BATCH, 1600)},
        intermediate_size=128,
        conv_dim=[32, 32, 32],
        conv_stride=[5, 4, 2],
        conv_kernel=[10, 8, 4],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        **_LAYERS,
    ),
    "autoformer": _transformers(
        "AutoformerModel",
        lambda: {
            "past_values": torch.randn(BATCH, 31),
            "past_time_features": torch.randn(BATCH, 31, 2),
            "past_observed_mask": torch.ones(BATCH, 31),
            "future_values": torch.randn(BATCH, 8),
            "future_time_features": torch.randn(BATCH, 8, 2),
        },
        prediction_length=8,
        context_length=24,
        lags_sequence=[1, 2, 7],
        num_time_features=2,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        moving_average=9,
        **_ENCODER_DECODER,
    ),
    "lora": _peft("LoraConfig", r=8, target_modules=["q_proj", "v_proj", "down_proj"]),
    "dora": _peft("LoraConfig", r=8, target_modules=["q_proj", "v_proj"], use_dora=True),
    "ia3": _peft("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "unet": _diffusers(
        "UNet2DModel",
        _noise(),
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ),
    "unet conditioned": _diffusers(
        "UNet2DConditionModel",
        _noise(encoder_hidden_states=_prompt(32)),
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "autoencoder": _diffusers(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(BATCH, 3, 16, 16)},
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    ),
    "dit": _diffusers(
        "DiTTransformer2DModel",
        _noise(_flat=bool, class_labels=lambda: torch.tensor([1, 5])),
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=4,
        num_embeds_ada_norm=10,
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        _noise(_flat=bool, encoder_hidden_states=_prompt(32), pooled_projections=lambda: torch.randn(BATCH, 32)),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    ),
    "resnet": _timm("resnet18"),
    "convnext": _timm("convnext_atto", depths=(1, 1, 1, 1)),
    "efficientnet": _timm("efficientnet_lite0"),
    "mobilenetv3": _timm("mobilenetv3_small_050"),
    "mixer": _timm("mixer_s32_224", img_size=64),
    "vit of timm": _timm("vit_tiny_patch16_224", img_size=64, depth=2),
    "gcn": _graph("GCN"),
    "gat": _graph("GAT", heads=4),
    "graphsage": _graph("GraphSAGE"),
    "gin": _graph("GIN"),
}
