"""Whether the identity in a batch norm's place still reads the layer that has absorbed it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..norm.linear_layers import LinearLayer


@contextlib.contextmanager
def directly_read(layers: Mapping[str, LinearLayer], notes: Mapping[str, nn.Identity]) -> Iterator[set[str]]:
    """Within, tells which notes read their layer's output: the paths noted may be out of date."""
    latest: dict[str, Tensor] = {}
    direct, wrong = set[str](), set[str]()

    def note(path: str, output: Tensor) -> None:
        latest[path] = output

    def compare(path: str, read: Any) -> None:
        (direct if read is latest.get(path) else wrong).add(path)

    with contextlib.ExitStack() as hooks:
        hooks.callback(direct.difference_update, wrong)
        for path, identity in notes.items():
            hooks.enter_context(
                layers[path].register_forward_hook(
                    lambda _layer, _args, output, path=path: note(path, output), prepend=True
                )
            )
            hooks.enter_context(
                identity.register_forward_pre_hook(lambda _identity, args, path=path: compare(path, args[0]))
            )
        yield direct
