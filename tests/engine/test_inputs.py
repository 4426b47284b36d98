"""Extents of the input: remembered, given as a shape, or asked for where they matter."""

import pytest
import torch
import torch.nn as nn

import varprop as vp


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def pooled():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2)
    )


def channels():
    return vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))


def stds(result):
    return [float(moments.std.detach().mean()) for moments in result.by_module().values()]


@pytest.mark.parametrize("make", [convolutions, pooled])
@pytest.mark.parametrize(
    "call",
    [
        vp.propagate,
        vp.normalize,
        vp.init_,
        vp.inspect,
        lambda model, moments: vp.reparametrize(model, to="analytic", moments=moments),
    ],
    ids=["propagate", "normalize", "init_", "inspect", "reparametrize"],
)
def test_axes_of_unknown_extent_are_refused_where_something_looks_along_them(make, call):
    with pytest.raises(
        vp.CaptureError, match=r"example=\(1, 3, 32, 32\), or example=\(1, 3, 1, 1\) if it is no longer than that\.$"
    ):
        call(make(), channels())


def test_the_sentence_names_the_operation():
    with pytest.raises(vp.CaptureError, match="extent 1 along axis 3, and conv2d in '0' looks along it: say how long"):
        vp.propagate(convolutions(), channels())


LOOKING = {
    "average": (nn.AdaptiveAvgPool2d(1), (1, 3, 1, 1)),
    "softmax along positions": (nn.Softmax(-1), (1, 3, 1)),
    "instance norm": (nn.InstanceNorm2d(3).eval(), (1, 3, 1, 1)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (1, 1, 8)),
    "recurrent": (nn.LSTM(4, 5, batch_first=True), (1, 1, 4)),
}


@pytest.mark.parametrize(("model", "shape"), LOOKING.values(), ids=LOOKING.keys())
def test_whatever_looks_along_an_axis_is_noticed(model, shape):
    with pytest.raises(vp.CaptureError, match="example="):
        vp.propagate(model, vp.Moments(torch.zeros(shape), torch.ones(shape)))


INDIFFERENT = {
    "one by one": (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), (1, 3, 1, 1)),
    "one feature": (nn.Sequential(nn.Linear(1, 5), nn.Tanh()), (1, 1)),
    "one channel": (nn.Conv2d(1, 4, 3), (1, 1, 8, 8)),
    "elementwise": (nn.Sigmoid(), (1, 1)),
    "a batch behind time": (nn.LSTM(2, 2), (1, 1, 2)),
    "tokens one by one": (nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), (1, 1, 6)),
}


@pytest.mark.parametrize(("model", "shape"), INDIFFERENT.values(), ids=INDIFFERENT.keys())
def test_extents_that_do_not_matter_need_not_be_given(model, shape):
    vp.propagate(model, vp.Moments(torch.zeros(shape), torch.ones(shape)))


def test_moments_of_data_know_its_extents():
    data = torch.randn(10, 3, 32, 32)
    moments = vp.input_moments(data)
    assert moments.shape == (1, 3, 1, 1) and moments.full == (1, 3, 32, 32)
    for make in (convolutions, pooled):
        expected = vp.propagate(make(), moments, example=data[:1])
        assert stds(vp.propagate(make(), moments)) == stds(expected)
        vp.normalize(make(), moments)
        vp.inspect(vp.init_(make(), moments), moments)


@pytest.mark.parametrize(
    "example", [(1, 3, 32, 32), [1, 3, 32, 32], torch.Size([1, 3, 32, 32]), {"input": (1, 3, 32, 32)}]
)
def test_a_shape_is_an_example(example):
    assert stds(vp.propagate(convolutions(), channels(), example)) == stds(
        vp.propagate(convolutions(), channels(), torch.zeros(1, 3, 32, 32))
    )


def test_a_shape_is_an_example_everywhere():
    moments, shape = channels(), (1, 3, 32, 32)
    vp.inspect(pooled(), moments, example=shape)
    vp.init_(pooled(), moments, example=shape)
    vp.normalize(pooled(), moments, example=shape)
    vp.reparametrize(pooled(), to="analytic", moments=moments, example=shape)
    vp.param_groups(pooled(), 1e-4, example=shape)
    assert vp.coverage(pooled(), shape).complete
    assert vp.propagate(vp.capture(pooled(), shape), moments).output.full == (1, 2)


def test_shapes_of_several_inputs_and_of_tokens():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)

        def forward(self, x, words):
            return x + self.table(words)

    given = (vp.Moments(0.0, 1.0), vp.Tokens.uniform(7))
    assert vp.propagate(Both(), given, ((1, 5, 4), (1, 5))).output.full == (1, 5, 4)
    named = {"x": given[0], "words": given[1]}
    assert vp.propagate(Both(), named, {"words": (1, 5), "x": (1, 5, 4)}).output.full == (1, 5, 4)


def test_the_shape_has_the_dtype_of_the_model():
    model = convolutions().double()
    assert vp.propagate(model, vp.Moments(0.0, 1.0), (1, 3, 8, 8)).output.dtype == torch.float64


def test_one_mean_and_variance_for_everything():
    one = vp.propagate(convolutions(), vp.Moments(0.0, 1.0), (1, 3, 8, 8))
    assert stds(one) == stds(vp.propagate(convolutions(), channels(), (1, 3, 8, 8)))
    with pytest.raises(vp.CaptureError, match="have no shape: give one, such as example="):
        vp.propagate(convolutions(), vp.Moments(0.0, 1.0))


@pytest.mark.parametrize(("example", "words"), [((1, 3, 0, 8), "1 or more"), ((3, 8, 8), "the model sees")])
def test_shapes_that_cannot_be_are_refused(example, words):
    with pytest.raises(vp.CaptureError, match=words):
        vp.propagate(convolutions(), channels(), example)


def test_a_tuple_of_numbers_beside_a_tensor_stays_an_argument():
    class Sized(nn.Module):
        def forward(self, x, size):
            return nn.functional.interpolate(x, size)

    found = vp.propagate(vp.capture(Sized(), (torch.zeros(1, 3, 4, 4), (8, 8))), channels())
    assert found.output.full == (1, 3, 8, 8)


class WithFlags(nn.Module):
    """Returns what its flag says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mode: str = "off", scale: float | None = None) -> torch.Tensor:
        return self.layer(x) if mode == "on" else x


@pytest.mark.parametrize(
    ("given", "example"),
    [
        ({"x": vp.Moments(0.0, 1.0)}, {"x": (1, 4), "mode": "on"}),
        (vp.Moments(0.0, 1.0), ((1, 4), "on", None)),
        ((vp.Moments(0.0, 1.0), "on"), [(1, 4), "on"]),
    ],
    ids=["by name", "by place", "list"],
)
def test_shapes_may_stand_beside_flags(given, example) -> None:
    assert vp.propagate(WithFlags(), given, example).output.full == (1, 2)


def test_whole_numbers_beside_a_tensor_are_no_shape() -> None:
    class Resized(nn.Module):
        def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
            return nn.functional.interpolate(x, size=size)

    example = torch.zeros(1, 3, 8, 8), (4, 2)
    assert vp.propagate(Resized(), (vp.Moments(0.0, 1.0), (4, 2)), example).output.full == (1, 3, 4, 2)


@pytest.mark.parametrize("model", [torch.relu, nn.ReLU, None], ids=["function", "class", "nothing"])
def test_what_is_no_module_is_refused(model):
    for call in (vp.capture, vp.coverage, lambda m, e: vp.propagate(m, vp.Moments(0.0, 1.0), e), vp.summary):
        with pytest.raises(vp.CaptureError, match=r"A model is a torch.nn.Module, not"):
            call(model, (1, 3))


def test_a_model_without_parameters_computes_in_the_dtype_of_the_moments():
    given = vp.Moments(torch.zeros(1, 3, dtype=torch.float64), 1.0)
    assert vp.propagate(nn.ReLU(), given, (1, 3)).output.dtype is torch.float64


def test_images_of_bytes_are_propagated_as_the_numbers_they_become():
    class OfBytes(nn.Module):
        def forward(self, x):
            return x.float() / 255

    given = vp.Moments(torch.full((1, 3, 1, 1), 100.0), 400.0)
    with pytest.raises(vp.CaptureError, match="an example of floating point numbers for images of bytes"):
        vp.propagate(OfBytes(), given, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    found = vp.propagate(OfBytes(), given, (1, 3, 8, 8)).output
    torch.testing.assert_close(found.std, torch.full((1, 3, 1, 1), 20 / 255))
