"""Packed images are the images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.pack_cifar10 import main, packed, unpacked


def test_there_and_back(tmp_path: Path) -> None:
    extremes = torch.randint(2, (30, 3073), generator=torch.Generator().manual_seed(0)) * 255
    noise = torch.randint(256, (30, 3073), generator=torch.Generator().manual_seed(1))
    content = bytes(torch.cat([extremes, noise]).to(torch.uint8).numpy())
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes(content)
    main("pack", str(tmp_path / "data"), str(tmp_path / "packed"))
    main("unpack", str(tmp_path / "packed"), str(tmp_path / "there"))
    assert (tmp_path / "there" / "cifar-10-batches-bin" / "test_batch.bin").read_bytes() == content


def test_damage_is_noticed() -> None:
    content = packed(bytes(3073))
    with pytest.raises(ValueError, match="damaged"):
        unpacked(bytes(32) + content[32:])
