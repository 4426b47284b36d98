import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import varprop as vp
from varprop_lab.batches import Augmentation, augmented, moved, scaled, statistics
from varprop_lab.datasets import Dataset

MNIST = Augmentation(shift=2)
CIFAR = Augmentation(shift=2, flip=True, noise_variance=0.1)


def bytes_of(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def dataset_of(images):
    labels = torch.zeros(len(images), dtype=torch.int64)
    return Dataset("own", images, labels, images[:1], labels[:1], classes=1)


def draws(count, augmentation, seed=0):
    """Offsets and flips of so many images, as `moved` takes them."""
    generator = torch.Generator().manual_seed(seed)
    offsets = [torch.randint(0, 2 * augmentation.shift + 1, (count,), generator=generator) for _ in range(2)]
    flips = torch.rand(count, generator=generator) < 0.5
    return *(offsets if augmentation.shift else (None, None)), flips if augmentation.flip else None


def moved_one_by_one(images, shift, rows, columns, flips):
    """The definition, in loops: a pixel goes down and right by (offset - shift), then the image is mirrored."""
    out = torch.zeros_like(images)
    height, width = images.shape[-2:]
    for b, image in enumerate(images):
        down = int(rows[b]) - shift if rows is not None else 0
        right = int(columns[b]) - shift if columns is not None else 0
        for y in range(height):
            for x in range(width):
                if 0 <= y - down < height and 0 <= x - right < width:
                    out[b, :, y, x] = image[:, y - down, x - right]
        if flips is not None and flips[b]:
            out[b] = out[b].flip(-1)
    return out


@pytest.mark.parametrize(
    "augmentation", [MNIST, Augmentation(shift=1, flip=True), Augmentation(flip=True), Augmentation()]
)
@pytest.mark.parametrize("shape", [(40, 1, 6, 5), (40, 3, 5, 7)])
def test_every_pixel_lands_where_the_definition_says(augmentation, shape):
    images, drawn = bytes_of(*shape), draws(shape[0], augmentation)
    expected = moved_one_by_one(images, augmentation.shift, *drawn)
    assert torch.equal(moved(images, augmentation.shift, *drawn), expected)


def test_offsets_and_flips_are_uniform():
    count = 50_000
    images = torch.zeros(count, 1, 5, 5, dtype=torch.uint8)
    images[:, :, 2, 2] = 255
    for flip in (False, True):  # a uniform column stays uniform when it is mirrored
        landed = augmented(images, Augmentation(shift=2, flip=flip), torch.Generator().manual_seed(0))
        places = landed.flatten(1).argmax(1)
        for offsets in (places // 5, places % 5):
            counts = torch.bincount(offsets, minlength=5)
            assert (counts - count / 5).abs().max() < 5 * (count * 0.2 * 0.8) ** 0.5
    images[:, :, 2, 2], images[:, :, 2, 0] = 0, 255
    mirrored = augmented(images, Augmentation(flip=True), torch.Generator().manual_seed(0))[:, 0, 2, 4]
    assert abs(float(mirrored.sum()) - count / 2) < 5 * (count * 0.25) ** 0.5


def test_noise_has_the_variance_asked_for():
    pixels = augmented(torch.zeros(400, 3, 16, 16, dtype=torch.uint8), CIFAR, torch.Generator().manual_seed(0))
    count = pixels.numel()
    assert abs(pixels.mean()) < 5 * (0.1 / count) ** 0.5
    assert abs(pixels.var() - 0.1) < 5 * 0.1 * (2 / count) ** 0.5


def test_without_noise_pixels_stay_in_the_unit_interval_and_float_images_pass():
    images = torch.rand(16, 1, 8, 8)
    pixels = augmented(images, MNIST, torch.Generator().manual_seed(0))
    assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1
    assert torch.equal(scaled(images), images)
    assert scaled(bytes_of(2, 1, 3, 3)).max() <= 1


@pytest.mark.parametrize("augmentation", [CIFAR, Augmentation(noise_variance=0.1)])
@pytest.mark.parametrize("images", [bytes_of(8, 3, 10, 10), torch.rand(8, 3, 10, 10)])
def test_the_same_generator_gives_the_same_batch_and_the_input_is_left_alone(images, augmentation):
    before = images.clone()
    first, second = (augmented(images, augmentation, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(images, before)
    assert not torch.equal(first, augmented(images, augmentation, torch.Generator().manual_seed(4)))


def test_one_graph_serves_every_draw():
    """No step depends on the values of the draws: traced without them, it can be captured on a device."""
    images = bytes_of(8, 3, 6, 6)
    traced = make_fx(lambda *drawn: moved(images, CIFAR.shift, *drawn), tracing_mode="real")(*draws(8, CIFAR))
    assert torch.equal(traced(*draws(8, CIFAR, 1)), moved(images, CIFAR.shift, *draws(8, CIFAR, 1)))


@pytest.mark.parametrize("shape", [(60, 1, 8, 8), (60, 3, 6, 7)])
@pytest.mark.parametrize("augmentation", [MNIST, CIFAR, Augmentation()])
def test_statistics_are_the_limit_of_many_passes(shape, augmentation):
    images = bytes_of(*shape)
    indices = torch.arange(0, 60, 2)
    found = statistics(dataset_of(images), indices, augmentation)
    per = "channel" if shape[1] > 1 else "element"
    generator = torch.Generator().manual_seed(0)
    passes = 400 if augmentation != Augmentation() else 1
    measured = vp.input_moments([augmented(images[indices], augmentation, generator) for _ in range(passes)], per=per)
    assert found.shape == measured.shape == ((1, 3, 1, 1) if shape[1] > 1 else (1, *shape[1:]))
    # 12000 samples a pixel: five standard errors of the mean, and of the variance with fourth moments below 3 var^2.
    slack = 5 * (measured.var / (30 * passes)).sqrt() if passes > 1 else 1e-6
    assert ((found.mean - measured.mean).abs() <= slack).all()
    slack = 5 * measured.var * (2 / (30 * passes)) ** 0.5 if passes > 1 else 1e-6
    assert ((found.var - measured.var).abs() <= slack).all()


def test_statistics_of_pixels_that_are_always_zero_are_exactly_zero():
    images = torch.zeros(10, 1, 12, 12, dtype=torch.uint8)
    images[:, :, 5:7, 5:7] = bytes_of(10, 1, 2, 2)
    found = statistics(dataset_of(images), torch.arange(10), MNIST)
    assert found.mean[0, 0, 0, 0] == 0 and found.var[0, 0, 0, 0] == 0
    assert found.var[0, 0, 5, 5] > 0


def test_statistics_do_not_look_at_the_images_held_out():
    images = bytes_of(10, 1, 4, 4)
    changed = images.clone()
    changed[9] = 0
    kept = torch.arange(9)
    first, second = (statistics(dataset_of(x), kept, MNIST) for x in (images, changed))
    assert torch.equal(first.mean, second.mean) and torch.equal(first.var, second.var)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        Augmentation(shift=-1)
    with pytest.raises(ValueError, match="at least one"):
        statistics(dataset_of(bytes_of(2, 1, 2, 2)), torch.arange(0), MNIST)
