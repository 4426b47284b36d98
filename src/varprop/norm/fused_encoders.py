"""torch's own encoder layers in evaluation mode: one fused operation reads the weights of their linear layers by hand.

It would take those of normalized layers as they are, so such a layer does one operation after the other while it is
normalized; `fold` lets it fuse them again.
"""

from __future__ import annotations

from torch import nn

from .layers import normalized_layers

# by which each class of module decides, and what forbids it
SWITCHES = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_BEFORE = "_switch_before_normalize"


def forbid_fusing_(model: nn.Module) -> None:
    """Let encoder layers that hold normalized ones call these."""
    for module in model.modules():
        for owner, (switch, off) in SWITCHES.items():
            if isinstance(module, owner) and hasattr(module, switch) and normalized_layers(module):
                setattr(module, _BEFORE, getattr(module, switch))
                setattr(module, switch, off)


def allow_fusing_(model: nn.Module) -> None:
    """Let all encoder layers be as they were."""
    for module in model.modules():
        for owner, (switch, _) in SWITCHES.items():
            if isinstance(module, owner) and hasattr(module, _BEFORE):
                setattr(module, switch, getattr(module, _BEFORE))
                delattr(module, _BEFORE)
