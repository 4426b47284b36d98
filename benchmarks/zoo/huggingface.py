"""Models of transformers and diffusers, small, from their configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .inputs import Inputs, Normal, Words

# Small settings for every architecture of transformers, whose names for them differ.
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "num_key_value_heads": 2, "head_dim": 32, "n_embd": 128, "n_layer": 2, "n_head": 4, "dim": 128, "n_layers": 2,
    "n_heads": 4, "hidden_dim": 256, "embedding_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128, "d_model": 128,
    "num_layers": 2, "num_heads": 4, "d_ff": 256, "d_kv": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {  # sized by stages: taken as they are
    "swin": {}, "resnet": {}, "convnext": {}, "segformer": {}, "whisper": SMALL | {"max_source_positions": 100},
}  # fmt: skip
KINDS = {"deberta_v2": "deberta-v2", "hf_swin": "swin", "hf_resnet": "resnet", "hf_convnext": "convnext"}
IMAGES = {"vit", "dinov2", "swin", "resnet", "convnext", "segformer"}

DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": 32, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "AutoencoderKL": {
        "block_out_channels": (32, 64), "norm_num_groups": 8, "sample_size": 32,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "DiTTransformer2DModel": {
        "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16, "in_channels": 4,
    },
}  # fmt: skip


def from_transformers(name: str) -> tuple[nn.Module, Inputs]:
    """A small model of an architecture, from its configuration."""
    import transformers

    kind = KINDS.get(name, name)
    config = transformers.AutoConfig.for_model(kind, **SIZES.get(kind, SMALL))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = transformers.AutoModel.from_config(config)
    return Placed(model, config.pad_token_id + 1) if kind == "roberta" else model, _inputs(kind, config)


class Placed(nn.Module):
    """RoBERTa with its positions given, which it would count by the padding tokens it meets."""

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, input_ids: torch.Tensor) -> Any:
        positions = torch.arange(input_ids.shape[1]) + self.first
        return self.model(input_ids=input_ids, position_ids=positions.unsqueeze(0))


def _inputs(kind: str, config: Any) -> Inputs:
    words = Words(getattr(config, "vocab_size", 0))
    if kind in IMAGES:
        return {"pixel_values": Normal((1, 3, 224, 224))}
    if kind == "wav2vec2":
        return {"input_values": Normal((1, 4000))}
    if kind == "whisper":
        return {"input_features": Normal((1, config.num_mel_bins, 200)), "decoder_input_ids": words}
    return {"input_ids": words, "decoder_input_ids": words} if kind == "t5" else {"input_ids": words}


def from_diffusers(name: str) -> tuple[nn.Module, Inputs]:
    """A small model of the denoising and autoencoding networks; time step and class are constants."""
    import diffusers

    model = getattr(diffusers, name)(**DIFFUSERS[name])
    if name == "AutoencoderKL":
        return model, {"sample": Normal((1, 3, 32, 32))}
    image = Normal((1, 3, 32, 32)) if name == "UNet2DModel" else Normal((1, 4, 16, 16))
    return WithConstants(model, name), (image,)


class WithConstants(nn.Module):
    """The model at time step 10, for class 1 where it knows classes."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.classes = name == "DiTTransformer2DModel"

    def forward(self, x: Any) -> Any:
        step = torch.full((1,), 10)
        more = {"class_labels": torch.ones(1, dtype=torch.long)} if self.classes else {}
        return self.model(x, timestep=step, **more, return_dict=False)[0]
