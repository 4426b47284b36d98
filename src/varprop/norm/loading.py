"""A checkpoint of another function is refused before anything of it is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..moments import Moments, Tokens
from .network import Network
from .statistics import Statistics

ANOTHER_FUNCTION = (
    "The checkpoint belongs to a model that was normalized with other input moments, in another form or for inputs of "
    "another size: call vp.normalize with those, then load."
)


class ChecksCheckpoints(nn.Module):
    """A layer whose state says for which function it was saved."""

    centred_rows: bool = False
    networks: dict[bool, tuple[Network, int]]  # by mode: which it is part of, and its place there
    statistics: dict[bool, Statistics]  # by mode, where it is part of none: what enters it

    def get_extra_state(self) -> Tensor:
        """What besides parameters defines the function of the layer's network, or of the layer by itself.

        The first layer of a network speaks for all of it, the others have nothing to say. A layer by itself tells
        whether its rows are centred, and the moments of the inputs that it reads.
        """
        if False in self.networks:
            network, place = self.networks[False]
            return torch.empty(0) if place else network.facts()
        inputs = self.statistics[False].facts(Moments, Tokens)
        told = self.centred_rows or len(inputs)
        return torch.cat([torch.tensor([float(self.centred_rows)]).double(), inputs]) if told else torch.empty(0)

    def _is_told_by_older_versions(self, state: Tensor) -> bool:
        """Whether facts are those of a checkpoint from before the moments of all inputs were among them."""
        if False not in self.networks:
            return self.centred_rows and len(state) == 1
        network, _ = self.networks[False]
        return 0 < len(state) == len(self.get_extra_state()) - len(network.joint.facts(Tokens))

    def set_extra_state(self, state: Tensor) -> None:
        """Compare what a checkpoint was made for with what this model was made for.

        Raises:
            ValueError: If they differ: the parameters would mean another function here.
        """
        if not isinstance(state, Tensor):
            raise ValueError("The checkpoint was not saved from a normalized model: its extra state is no tensor.")
        facts = self.get_extra_state().to(state.device)
        facts = facts[: len(state)] if self._is_told_by_older_versions(state) else facts
        if facts.shape != state.shape or not torch.allclose(facts, state.to(facts.dtype), rtol=1e-4, atol=1e-6):
            raise ValueError(ANOTHER_FUNCTION)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not len(destination[f"{prefix}_extra_state"]):
            del destination[f"{prefix}_extra_state"]

    def check_state(self, state_dict: Any, prefix: str) -> None:
        """Compare what is to be loaded with what this model was made for.

        Raises:
            ValueError: As `set_extra_state`.
        """
        facts, scales = f"{prefix}_extra_state", [name for name in self._parameters if name.startswith("scale")]
        if facts in state_dict:
            self.set_extra_state(state_dict[facts])
        from_normalized = any(f"{prefix}{name}" in state_dict for name in scales)
        if self.centred_rows and False not in self.networks and from_normalized and facts not in state_dict:
            raise ValueError(ANOTHER_FUNCTION)  # of a layer by itself, which has told that it is centred if it was

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        self.check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        # Older versions told nothing of a layer by itself with rows as they are.
        silent = not len(self.get_extra_state()) or (False not in self.networks and not self.centred_rows)
        if silent and f"{prefix}_extra_state" in missing:
            missing.remove(f"{prefix}_extra_state")


def check_facts(model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Let every layer compare what the checkpoint was made for: torch asks them one by one, while it loads."""
    for path, layer in model.named_modules():
        if isinstance(layer, ChecksCheckpoints):
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
