"""CIFAR-10 packed without loss to five ninths of its size, for machines to which little can be carried at a time.

    python -m tools.pack_cifar10 pack DATA PACKED      # DATA/cifar-10-batches-bin/*.bin -> PACKED/*.bin.packed
    python -m tools.pack_cifar10 unpack PACKED DATA    # and back: whatever is in PACKED

Colours are taken as green and differences to green, every value as its difference to the median of what its left and
upper neighbours predict (the predictor of LOCO-I), and the differences are compressed by LZMA.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
from pathlib import Path

import torch
from torch import Tensor

from varprop_lab.datasets import CIFAR10_FOLDER

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


def packed(content: bytes) -> bytes:
    """Records of a label and three planes, compressed, behind their SHA-256."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    red, green, blue = records[:, 1:].view(-1, *SHAPE).to(torch.int16).unbind(1)
    values = torch.stack([green, red - green, blue - green])
    frame = torch.nn.functional.pad(values, (1, 0, 1, 0))
    differences = (values - _predicted(frame[..., 1:, :-1], frame[..., :-1, 1:], frame[..., :-1, :-1])).to(torch.uint8)
    stream = torch.cat([records[:, 0].flatten(), differences.flatten()])
    return hashlib.sha256(content).digest() + lzma.compress(bytes(stream.numpy()))


def unpacked(content: bytes) -> bytes:
    """The records again.

    Raises:
        ValueError: If they are not what was packed.
    """
    stream = torch.frombuffer(bytearray(lzma.decompress(content[32:])), dtype=torch.uint8)
    count = len(stream) // RECORD
    differences = stream[count:].view(3, count, 32, 32).to(torch.int16).permute(2, 3, 0, 1).contiguous()
    frame = torch.zeros(33, 33, 3, count, dtype=torch.int16)  # a border of zeros above and to the left
    for row in range(1, 33):
        for column in range(1, 33):
            left, up, corner = frame[row, column - 1], frame[row - 1, column], frame[row - 1, column - 1]
            value = (_predicted(left, up, corner) + differences[row - 1, column - 1]) & 255
            # modulo 256, a difference to green is known by red and blue being bytes
            value[1:] = ((value[1:] + value[0]) & 255) - value[0]
            frame[row, column] = value
    values = frame[1:, 1:].permute(3, 2, 0, 1)
    planes = torch.stack([values[:, 1] + values[:, 0], values[:, 0], values[:, 2] + values[:, 0]], 1)
    records = torch.cat([stream[:count, None], planes.to(torch.uint8).reshape(count, -1)], 1)
    result = bytes(records.numpy())
    if hashlib.sha256(result).digest() != content[:32]:
        raise ValueError("The packed images are damaged: pack them again.")
    return result


def _predicted(left: Tensor, up: Tensor, corner: Tensor) -> Tensor:
    """The median of left, up and left + up - corner."""
    low, high = torch.minimum(left, up), torch.maximum(left, up)
    return torch.minimum(torch.maximum(left + up - corner, low), high)


def main(action: str, source: str, target: str) -> None:
    """Pack or unpack all files of a folder."""
    if action == "pack":
        Path(target).mkdir(parents=True, exist_ok=True)
        for file in sorted((Path(source) / CIFAR10_FOLDER).glob("*.bin")):
            (Path(target) / f"{file.name}.packed").write_bytes(packed(file.read_bytes()))
    else:
        folder = Path(target) / CIFAR10_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(source).glob("*.packed")):
            (folder / file.stem).write_bytes(unpacked(file.read_bytes()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("source")
    parser.add_argument("target")
    main(**vars(parser.parse_args()))
