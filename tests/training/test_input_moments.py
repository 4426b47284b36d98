"""Input moments: against the two-pass formula, for every kind of container, and every refusal."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from varprop import input_moments


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 3.0, 0.1]).view(1, 3, 1, 1)
    return torch.randn(50, 3, 5, 4, generator=generator) * scale + torch.tensor([0.0, 7.0, -2.0]).view(1, 3, 1, 1)


def two_pass(x, axes):
    x = x.double()
    return x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)


def assert_moments(moments, x, axes, tolerance=1e-6):
    mean, var = two_pass(x, axes)
    torch.testing.assert_close(moments.mean.double(), mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moments.var.double(), var, rtol=tolerance, atol=tolerance)


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


CONTAINERS = {
    "tensor": lambda x: x,
    "tensor dataset": lambda x: TensorDataset(x, torch.arange(len(x))),
    "items": lambda x: Items([(image, 3) for image in x]),
    "lists": lambda x: Items([[image, 1.0] for image in x]),
    "dicts": lambda x: Items([{"label": torch.tensor(1), "image": image} for image in x]),
    "nested": lambda x: Items([({"image": image}, 0) for image in x]),
    "stream": lambda x: Stream([(image, 3) for image in x]),
    "loader": lambda x: DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=8, shuffle=True),
    "stream loader": lambda x: DataLoader(Stream(list(x)), batch_size=8),
    "list of batches": lambda x: list(x.split(7)),
    "generator": lambda x: (batch for batch in x.split(13)),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize(
    ("per", "axes", "shape"), [("channel", (0, 2, 3), (1, 3, 1, 1)), ("element", (0,), (1, 3, 5, 4))]
)
def test_every_container_gives_the_two_pass_result(images, container, per, axes, shape):
    moments = input_moments(container(images), per=per)
    assert moments.mean.shape == moments.var.shape == shape
    assert moments.mean.dtype == torch.float32
    assert_moments(moments, images, axes)


@pytest.mark.parametrize("per", ["channel", "element"])
def test_items_of_one_axis_keep_their_features(per):
    x = torch.randn(20, 6, dtype=torch.float64)
    moments = input_moments(x, per=per)
    assert moments.mean.shape == (1, 6)
    assert_moments(moments, x, (0,), tolerance=1e-13)


def test_items_that_are_numbers():
    x = torch.randn(20)
    assert input_moments(x).mean.shape == (1,)
    assert_moments(input_moments(TensorDataset(x)), x, (0,))


def test_channels_may_come_in_images_of_several_sizes():
    sizes = [torch.randn(3, n, n + 1, dtype=torch.float64) for n in (4, 7, 7, 2)]
    pixels = torch.cat([image.flatten(1) for image in sizes], dim=1).T
    moments = input_moments(Items(sizes))
    assert moments.mean.shape == (1, 3, 1, 1)
    torch.testing.assert_close(moments.mean.flatten(), pixels.mean(0))
    torch.testing.assert_close(moments.var.flatten(), pixels.var(0, correction=0))


def test_a_large_offset_cancels_nothing():
    x = (torch.arange(4096, dtype=torch.float64) % 7).view(-1, 1) + 1e9
    expected = (x - 1e9).var(correction=0)
    moments = input_moments(x.split(17))
    torch.testing.assert_close(moments.var.squeeze(), expected, rtol=1e-9, atol=0)


def test_float32_is_accumulated_in_float64():
    x = torch.full((300_000, 1), 0.1)
    torch.testing.assert_close(input_moments(x).mean, torch.full((1, 1), 0.1), rtol=0, atol=0)
    assert input_moments(x).var.item() < 1e-30


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_dtype_is_the_datas_and_never_half(dtype, expected):
    moments = input_moments(torch.randn(8, 2).to(dtype))
    assert moments.mean.dtype == moments.var.dtype == expected


def test_chunks_larger_than_the_budget_are_split(images):
    images = images.repeat(1, 1, 20, 30)
    assert images.numel() > 1.5 * 2**20  # a pass takes 2**20 numbers
    assert_moments(input_moments(images), images, (0, 2, 3))
    assert_moments(input_moments(TensorDataset(images)), images, (0, 2, 3))
    assert_moments(input_moments([images, images[:3]]), torch.cat([images, images[:3]]), (0, 2, 3))


def test_one_item_has_variance_zero_and_gradients_are_left_alone():
    x = torch.randn(1, 4, requires_grad=True)
    moments = input_moments(x)
    assert not moments.mean.requires_grad
    assert (moments.var == 0).all()


def test_empty_batches_are_skipped(images):
    assert_moments(input_moments([images[:0], images, images[:0]]), images, (0, 2, 3))


@pytest.mark.parametrize("empty", [torch.empty(0, 3), [], Items([]), Stream([]), [torch.empty(0, 3)]])
def test_empty_data_is_refused(empty):
    with pytest.raises(ValueError, match="empty"):
        input_moments(empty)


def test_bytes_are_refused_with_the_remedy():
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    for data in (image[None], Items([image]), Items([(image, 3)]), Items([(image, torch.tensor(0.5))])):
        with pytest.raises(TypeError, match=r"uint8.*convert the input to float.*ToTensor"):
            input_moments(data)


def test_the_target_behind_a_scan_is_not_taken_for_the_data():
    """Medical images are of 16 bits; their moments were those of what followed them."""
    scans = TensorDataset(torch.zeros(4, 1, 8, 8, dtype=torch.int16), torch.rand(4, 3))
    with pytest.raises(TypeError, match=r"item 0 \(found torch.int16\): convert the input to float"):
        input_moments(scans)


def test_tensors_that_are_not_dense_are_named():
    nested = torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(4, 2)])
    for data, kind in (
        (torch.eye(4).to_sparse(), "sparse_coo"),
        ([torch.eye(4).to_sparse_csr()], "sparse_csr"),
        (nested, "nested"),
    ):
        with pytest.raises(TypeError, match=f"holds a {kind} one"):
            input_moments(data)


def test_eight_bits_are_enough():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    assert_moments(input_moments([values[:1], values[1:]]), values.float(), (0,))
    assert input_moments(values).dtype is torch.float32


def test_no_floating_tensor_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"item 1 \(found str\)"):
        input_moments(Items([torch.zeros(2), "a word"]))
    with pytest.raises(TypeError, match=r"batch 0 \(found torch.int64\)"):
        input_moments([torch.arange(6).view(2, 3)])
    with pytest.raises(TypeError, match=r"tokens, give vp.Tokens\(probabilities\) or vp.Tokens.uniform"):
        input_moments([{"input_ids": torch.arange(6).view(2, 3), "labels": torch.zeros(2, dtype=torch.int64)}])
    with pytest.raises(TypeError, match=r"found torch.uint8\): convert the input to float"):
        input_moments(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"found ndarray\): give torch.from_numpy"):
        input_moments(numpy.zeros((6, 2)))


def test_differing_shapes_are_refused_per_element_and_differing_channels_always():
    with pytest.raises(ValueError, match=r"one shape.*item 1"):
        input_moments(Items([torch.zeros(3, 4, 4), torch.zeros(3, 5, 4)]), per="element")
    with pytest.raises(ValueError, match=r"one shape.*batch 1"):
        input_moments([torch.zeros(2, 3, 4), torch.zeros(2, 1, 4)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(images, bad):
    images[23, 1, 2, 3] = bad
    with pytest.raises(ValueError, match="item 23"):
        input_moments(images)
    with pytest.raises(ValueError, match="item 23"):
        input_moments(TensorDataset(images), per="element")
    with pytest.raises(ValueError, match=r"batch 2 \(row 3\)"):
        input_moments(DataLoader(images, batch_size=10))


def test_other_bad_use_is_refused():
    with pytest.raises(ValueError, match='"channel" or "element"'):
        input_moments(torch.zeros(2, 2), per="pixel")
    with pytest.raises(TypeError, match="not int"):
        input_moments(3)
    with pytest.raises(ValueError, match="batch axis"):
        input_moments(torch.tensor(1.0))


def test_extents_of_the_data_are_kept_where_all_items_have_them():
    small, large = torch.randn(4, 3, 8, 6), torch.randn(2, 3, 8, 9)
    assert input_moments(small).full == (1, 3, 8, 6)
    assert input_moments([small, small]).full == (1, 3, 8, 6)
    assert input_moments([small, large]).full == (1, 3, 8, 1)
    assert input_moments(small, per="element").full == (1, 3, 8, 6)


def test_covariance_in_pieces_is_that_of_all_data():
    torch.manual_seed(0)
    data = torch.randn(500, 2, 3) @ torch.randn(3, 3) + 5
    moments = input_moments([data[:100], data[100:101], data[101:]], covariance=True)
    expected = torch.cov(data.double().flatten(1).mT, correction=0)
    torch.testing.assert_close(moments.covariance.double(), expected, atol=1e-5, rtol=1e-5)
    assert moments.mean.shape == (1, 2, 3)
    assert torch.equal(moments.var.flatten(), moments.covariance.diagonal())
    assert input_moments(data[:, :1, :1], covariance=True).covariance.shape == (1, 1)


def test_covariance_is_one_of_elements_and_of_small_items():
    with pytest.raises(ValueError, match="leave `per` out"):
        input_moments(torch.zeros(2, 3), "channel", covariance=True)
    with pytest.raises(ValueError, match=r"Items of 20,000 elements have 4e\+08 covariances"):
        input_moments(torch.zeros(2, 20_000), covariance=True)
