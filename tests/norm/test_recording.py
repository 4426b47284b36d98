import torch

from varprop.norm.recording import Copier


def parts():
    """Pieces of two buffers in several layouts, a tensor of its own, and an empty one."""
    flat, other = torch.arange(60.0), torch.arange(8.0)
    last = flat[:54].view(2, 3, 3, 3).permute(0, 3, 1, 2)
    return [last, flat[54:], other[:5], other[5:], torch.ones(3, dtype=torch.float64), torch.empty(0)]


def test_copies_equal_the_parts_in_values_and_layout():
    originals = parts()
    for copy, original in zip(Copier(originals).copies(), originals, strict=True):
        assert torch.equal(copy, original) and copy.dtype == original.dtype
        assert copy.stride() == original.stride()


def test_copies_are_apart_from_the_parts_and_from_each_other():
    originals = parts()
    copier = Copier(originals)
    first = copier.copies()
    originals[0].fill_(-1)
    second = copier.copies()
    assert first[0].min() >= 0 and bool((second[0] == -1).all())
    assert torch.equal(first[1], second[1])
