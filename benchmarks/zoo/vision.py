"""Models of torchvision, timm and segmentation-models-pytorch, with random weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from .inputs import Inputs, Normal

SMALL = (128, 128)
# What torchvision's models see, by the beginning of their names; the others see small images.
EXTENTS = {
    "mvit": (16, 224, 224), "swin3d": (4, 64, 64), "s3d": (16, 224, 224), "mc3": (8, 64, 64), "r2plus1d": (8, 64, 64),
    "r3d": (8, 64, 64), "vit_h": (56, 56), "vit": (64, 64), "swin": (64, 64), "maxvit": (224, 224),
}  # fmt: skip

# Half the resolution a model of timm was made for is enough for a sweep, but for these: here is what they can take.
RESOLUTIONS = {
    "coat_tiny": 224, "deepseek_vit_412m": 112, "dla34": 128, "efficientformer_l1": 224, "efficientformerv2_s0": 224,
    "gcvit_tiny": 224, "gemma4_vit_167m": 192, "halonet26t": 256, "hiera_tiny_224": 224, "hrnet_w18_small": 128,
    "inception_resnet_v2": 160, "inception_v3": 160, "inception_v4": 160, "legacy_xception": 160, "nasnetalarge": 160,
    "pnasnet5large": 160, "qwen3_vit_88m": 128, "sam2_hiera_tiny": 128, "samvit_base_patch16": 256,
    "swinv2_cr_tiny_224": 224, "vit_tiny_r_s16_p8_224": 224, "xception41": 160,
}  # fmt: skip
# These must be told at birth.
SIZED = {
    "beit_base_patch16_224", "cait_s24_224", "convit_tiny", "deit_tiny_patch16_224", "efficientvit_m0",
    "eva02_tiny_patch14_224", "gmlp_ti16_224", "levit_384_s8", "maxvit_nano_rw_256", "nest_tiny", "pit_ti_224",
    "swin_s3_tiny_224", "swinv2_tiny_window8_256", "tnt_s_patch16_224", "vit_relpos_small_patch16_224",
    "vit_tiny_patch16_224", "visformer_tiny", "vitamin_small_224", "volo_d1_224",
}  # fmt: skip

# Chains of equal blocks, of which a few say as much as all.
CHAINS = {
    "beit_base_patch16_224", "cait_s24_224", "convit_tiny", "deepseek_vit_412m", "deit_tiny_patch16_224",
    "eva02_tiny_patch14_224", "gemma4_vit_167m", "naflexvit_base_patch16_siglip", "qwen3_vit_88m",
    "samvit_base_patch16", "tnt_s_patch16_224", "vit_relpos_small_patch16_224", "vit_tiny_patch16_224",
    "vit_tiny_r_s16_p8_224", "xcit_nano_12_p8_224",
}  # fmt: skip
BLOCKS = 4


def from_torchvision(name: str) -> tuple[nn.Module, Inputs]:
    """Any model of torchvision's list; optical flow takes two images."""
    import torchvision

    settings: dict[str, Any] = {"weights": None}
    if name.startswith(("deeplab", "fcn", "lraspp")):
        settings["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False
    extents = next((extents for start, extents in EXTENTS.items() if name.startswith(start)), SMALL)
    if name.startswith("vit"):
        settings["image_size"] = extents[-1]
    images = (Normal((1, 3, *extents)),) * (2 if name.startswith("raft") else 1)
    return torchvision.models.get_model(name, **settings), images


def from_timm(name: str) -> tuple[nn.Module, Inputs]:
    """Any model of timm's list, where it allows at half the resolution it was made for; chains of blocks cut short."""
    import timm

    made_for = timm.get_pretrained_cfg(name).input_size[-1]
    size = RESOLUTIONS.get(name, made_for // 2)
    settings = ({"img_size": size} if name in SIZED else {}) | ({"depth": BLOCKS} if name in CHAINS else {})
    model = timm.create_model(name, pretrained=False, **settings)
    return model, (Normal((1, 3, size, size)),)


def from_timm_whole(name: str) -> tuple[nn.Module, Inputs]:
    """Any model of timm's list as it was published."""
    import timm

    return timm.create_model(name, pretrained=False), (Normal((1, *timm.get_pretrained_cfg(name).input_size)),)


def from_smp(name: str) -> tuple[nn.Module, Inputs]:
    """A segmentation model over ResNet-18, or over the transformer it was published with."""
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)(encoder_name="resnet18", encoder_weights=None, classes=2)
    return model, (Normal((1, 3, *SMALL)),)
