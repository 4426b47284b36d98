"""A checkpoint of another function is refused before anything of it is loaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from .layers import Normalized


def check_facts(model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Let every layer compare what the checkpoint was made for: torch asks them one by one, while it loads."""
    for path, layer in model.named_modules():
        if isinstance(layer, Normalized):
            layer.check_state(state_dict, f"{prefix}{path}." if path else prefix)


def check_when_loading_(model: nn.Module) -> None:
    """Let `load_state_dict` of the model check first."""
    model.register_load_state_dict_pre_hook(check_facts)


def stop_checking_(model: nn.Module) -> None:
    """Take that away again."""
    for module in model.modules():
        hooks = module._load_state_dict_pre_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) is check_facts:
                del hooks[key]
