"""The models of the zoo by name, group/name, as torchvision/resnet18 or hf/bert."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from .basic import from_torch
from .huggingface import from_diffusers, from_transformers
from .inputs import Inputs
from .science import from_monai, from_pyg
from .vision import from_smp, from_timm, from_timm_whole, from_torchvision

ROOT = Path(__file__).parents[2]
LIST, DRAWN = (Path(__file__).with_name(name) for name in ("models.txt", "drawn.txt"))
Builder = Callable[[str], tuple[nn.Module, Inputs]]
GROUPS: dict[str, tuple[str, Builder]] = {  # the package a group needs, and what makes its models
    "torchvision": ("torchvision", from_torchvision),
    "timm": ("timm", from_timm),
    "drawn": ("timm", from_timm_whole),
    "hf": ("transformers", from_transformers),
    "smp": ("segmentation_models_pytorch", from_smp),
    "monai": ("monai", from_monai),
    "pyg": ("torch_geometric", from_pyg),
    "diffusers": ("diffusers", from_diffusers),
    "basic": ("torch", from_torch),
}


def group_of(model_name: str) -> str:
    return model_name.partition("/")[0]


def prepare(group: str) -> None:
    """Import what the group needs; torchvision first, which most of them import and which needs help on a CPU build."""
    if group != "basic":
        importlib.import_module("tests.torchvision_on_cpu")
    importlib.import_module(GROUPS[group][0])


def build(model_name: str) -> tuple[nn.Module, Inputs]:
    """A model with the same random weights every time, in evaluation mode, and what to feed it."""
    group, _, name = model_name.partition("/")
    prepare(group)
    torch.manual_seed(0)
    model, inputs = GROUPS[group][1](name)
    return model.eval(), inputs


def all_names() -> list[str]:
    """The whole list, in its own order."""
    return LIST.read_text().split()


def drawn_names() -> list[str]:
    """Models of timm that were drawn at random, none of them in the whole list."""
    return DRAWN.read_text().split()


def present(names: list[str]) -> list[str]:
    """The models whose package is installed; for every other group one sentence is printed."""
    groups = dict.fromkeys(map(group_of, names))
    kept = {group for group in groups if group in GROUPS and importlib.util.find_spec(GROUPS[group][0]) is not None}
    for group in groups:
        if group not in kept:
            why = f"{GROUPS[group][0]} is not installed" if group in GROUPS else "there is no builder for it here"
            print(f"{group}: left out, {why}.", flush=True)
    return [name for name in names if group_of(name) in kept]
