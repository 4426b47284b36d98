import contextlib
import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import varprop as vp
import varprop_lab
from varprop.cli.progress import Progress
from varprop_lab.batches import Augmentation
from varprop_lab.comparison import CompareError, data_of
from varprop_lab.protocol import ALL_METHODS, TRAIN_LOSS, VALID_ACCURACY


def quiet(total, title):
    return contextlib.nullcontext(Progress(total, title))


OWN = """
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 1, 4, 4, generator=generator)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    return x[:60], y[:60], x[60:], y[60:]

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2))

def loss(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets)

def optimizer(groups, lr):
    return torch.optim.SGD(groups, lr)

def too_small():
    return nn.Linear(3, 2)

made = model()

def not_data():
    return 1

def raising():
    raise ValueError("no such width")

class Raising(nn.Module):
    def forward(self, x):
        return {}["lost"]

def raising_later():
    return Raising()

def raising_data():
    return 1 / 0

def five():
    x, y, *test = data()
    return x[:5], y[:5], *test

def constant():
    x, y, *test = data()
    return torch.ones_like(x), y, *test

def one_class():
    x, y, *test = data()
    return x, torch.ones_like(y), *test

def no_layer():
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(2))

def holed():
    x, y, test_x, test_y = data()
    test_x[7, 0, 1, 2] = float("nan")
    return x, y, test_x, test_y
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


QUICK = {"epochs": 1, "batch_size": 16, "device": "cpu", "show": quiet}
X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] * X[:, 1] > 0).long()


def halves(inputs, targets):
    return inputs[:40], targets[:40], inputs[40:], targets[40:]


def table_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))


def with_batch_norms():
    layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(8, 2), nn.BatchNorm1d(2))


def batch_norm_first():
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.output = nn.Embedding(12, 4), nn.Linear(20, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.output(torch.relu(self.hidden(self.embedding(tokens).flatten(1))))


def one_number():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.slow
def test_every_method_on_a_table_and_the_trained_networks_do_what_was_tested(tmp_path):
    data = halves(X, CLASSES)
    found = varprop_lab.compare(table_model, data, methods=ALL_METHODS, starts=("bn",), out=tmp_path, **QUICK)
    assert {outcome.cell.method for outcome in found.outcomes} == set(ALL_METHODS)
    assert (tmp_path / "compare" / "manifest.json").is_file() and found.folder == tmp_path / "compare"
    for outcome in found.outcomes:
        model = found.model(outcome.cell.method, "bn")
        loss = nn.functional.cross_entropy(model(data[2]), data[3])
        assert float(loss.detach()) == pytest.approx(outcome.test_loss, rel=1e-4)
        assert (outcome.start_gap > 1e-3) == (outcome.cell.method in ("layer", "group"))
    assert str(found).startswith(found.answer) and "GN" in found.table() and found.report().is_file()
    with pytest.raises(CompareError, match="no trained network of batch from none with seed 0"):
        found.model("batch", "none")


@pytest.mark.slow
def test_batch_norms_of_the_models_own_are_left_out(tmp_path):
    data = halves(X, CLASSES)
    found = varprop_lab.compare(
        with_batch_norms, data, methods=ALL_METHODS, starts=("none", "bn"), out=tmp_path, **QUICK
    )
    for outcome in found.outcomes:
        cell = outcome.cell
        model = found.model(cell.method, cell.start)
        assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
        loss = nn.functional.cross_entropy(model(data[2]), data[3])
        assert float(loss.detach()) == pytest.approx(outcome.test_loss, rel=1e-4)
        assert outcome.start_gap < 1e-4 or cell.method in ("layer", "group")


@pytest.mark.slow
def test_tokens(tmp_path):
    tokens = torch.randint(0, 11, (60, 5), generator=torch.Generator().manual_seed(1))
    data = halves(tokens.int(), (tokens[:, 0] > 5).long())
    found = varprop_lab.compare(TextModel, data, methods=("batch", "analytic"), starts=("ap2",), out=tmp_path, **QUICK)
    assert len(found.outcomes) == 2 and all(outcome.start_gap < 1e-4 for outcome in found.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_a_loss_and_an_optimizer_of_ones_own(tmp_path, optimizer):
    targets = 2 * X[:, :1] + 1  # with an axis that must not get lost
    options = {**QUICK, "loss": nn.functional.mse_loss, "optimizer": optimizer, "out": tmp_path}
    found = varprop_lab.compare(one_number, halves(X, targets), methods=("standard",), starts=("ap2",), **options)
    (outcome,) = found.outcomes
    assert VALID_ACCURACY not in outcome.curves and len(outcome.curves[TRAIN_LOSS]) == 1
    expected = nn.functional.mse_loss(found.model("standard", "ap2")(X[40:]), targets[40:])
    assert float(expected.detach()) == pytest.approx(outcome.test_loss, rel=1e-4)
    options["loss"] = nn.functional.l1_loss
    with pytest.raises(vp.VarpropError, match=r"The loss of .* changed"):
        varprop_lab.compare(
            one_number, halves(X, targets), methods=("standard",), starts=("ap2",), **{**options, "resume": True}
        )


def test_the_lab_is_imported_when_it_is_asked_for():
    assert varprop_lab.compare.__module__ == "varprop_lab.comparison"
    with pytest.raises(AttributeError, match="no attribute 'labor'"):
        varprop_lab.labor  # noqa: B018


@pytest.mark.parametrize(
    ("data", "model", "method", "message"),
    [
        ("data", "too_small", "batch", "The model does not take inputs of shape"),
        ("holed", "model", "batch", r"own.py:holed: 1 of 20 test inputs hold NaN or infinity, the first is number 7"),
        ("not_data", "model", "batch", "must be four tensors: .* or a torch Dataset, or two"),
        ("data", "raising", "batch", r"The function of the model failed: .*own\.py:\d+: ValueError: no such width"),
        ("data", "raising_later", "batch", r"does not take inputs of shape .*own\.py:\d+: KeyError: 'lost'"),
        ("raising_data", "model", "batch", r"The data set .* failed: .*own\.py:\d+: ZeroDivisionError"),
        ("five", "model", "batch", "5 training samples are too few, at least 10"),
        ("constant", "model", "batch", "all 60 training inputs are the same"),
        ("one_class", "model", "batch", "all training targets are class 1; two classes"),
        ("data", "no_layer", "batch", "has no linear, convolutional or recurrent layer"),
        ("data", "made", "batch", "given as a function that makes it"),
        ("data", "modle", "batch", "has no function or class 'modle'. Did you mean model?"),
        ("data", "model", "instance", "There is no method 'instance'"),
    ],
)
def test_what_cannot_be_compared_is_refused(own, tmp_path, data, model, method, message):
    with pytest.raises(vp.VarpropError, match=message):
        varprop_lab.compare(
            f"{own}:{model}", f"{own}:{data}", methods=(method,), starts=("none",), out=tmp_path, **QUICK
        )
    assert not (tmp_path / "compare").exists()


TOKENS = halves(torch.arange(300).view(60, 5) % 7, CLASSES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nowhere.py:model"}, r"There is no file nowhere\.py"),
        ({"model": "minst"}, r"path.py:function or one of .*Did you mean mnist\?"),
        ({"model": table_model()}, "given as a function that makes it"),
        ({"model": batch_norm_first}, "Batch norm '0' of the model does not directly follow a linear layer"),
        ({"data": "digist"}, r"no data set 'digist'.*Did you mean digits"),
        ({"data": halves(X, X)}, "training targets must be classes"),
        ({"data": halves(X, CLASSES)[:3]}, "The data must be four tensors"),
        ({"data": (*halves(X, CLASSES)[:2], X[:, :5], CLASSES)}, "must be of one kind"),
        ({"data": TOKENS, "augmentation": Augmentation(noise_variance=1.0)}, "noise for anything but tokens"),
        ({"augmentation": Augmentation(shift=1)}, "Offsets and flips are for images"),
        ({"loss": lambda outputs, targets: outputs}, "The loss must return one number"),
        ({"loss": nn.functional.mse_loss}, "The loss does not take outputs"),
        ({"optimizer": "AdmaW"}, r"Did you mean .*AdamW"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs more than gradients"),
        ({"batch_size": 1}, "The batch size must be at least 2"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"starts": ("ap",)}, r"no start 'ap'.*Did you mean ap2\?"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, changes, message):
    options = {"model": table_model, "data": halves(X, CLASSES), "methods": ("standard",), "starts": ("none",)}
    options = {**options, **QUICK, "out": tmp_path, **changes}
    with pytest.raises(vp.VarpropError, match=message):
        varprop_lab.compare(options.pop("model"), options.pop("data"), **options)
    assert not (tmp_path / "compare").exists()


def test_tokens_need_an_embedding_that_reads_them(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, tokens):
            return self.layer(tokens.float())

    with pytest.raises(vp.VarpropError, match=r"no nn\.Embedding of the model reads them"):
        varprop_lab.compare(Counts, TOKENS, methods=("analytic",), starts=("ap2",), out=tmp_path, **QUICK)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], int(self.targets[index])


def folder_of_pictures(folder):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 8), ("test", 3)):
        for label, colour in (("cat", 40), ("dog", 200)):
            (folder / part / label).mkdir(parents=True)
            for index in range(count):
                image.new("L", (5, 4), colour + index).save(folder / part / label / f"{index}.png")
    return str(folder)


def npz(file):
    x, y, test_x, test_y = (tensor.numpy() for tensor in halves(X, CLASSES))
    pytest.importorskip("numpy").savez(file, x_train=x, y_train=y, x_test=test_x, y_test=test_y)
    return str(file)


WAYS = {
    "tensors": lambda tmp: halves(X, CLASSES),
    "arrays": lambda tmp: tuple(tensor.numpy() for tensor in halves(X, CLASSES)),
    "pairs": lambda tmp: ((X[:40], CLASSES[:40]), (X[40:], CLASSES[40:])),
    "two torch Datasets": lambda tmp: (Pairs(X[:40], CLASSES[:40]), Pairs(X[40:], CLASSES[40:])),
    "npz": lambda tmp: npz(tmp / "data.npz"),
}


@pytest.mark.parametrize("way", WAYS)
def test_data_come_in_many_ways(tmp_path, way):
    data = data_of(WAYS[way](tmp_path), has_loss=False)
    expected = halves(X, CLASSES)
    for found, tensor in zip((data.train_x, data.train_y, data.test_x, data.test_y), expected, strict=True):
        assert torch.equal(found, tensor)
    assert data.classes == 2


def test_pictures_in_folders_are_data(tmp_path):
    data = data_of(folder_of_pictures(tmp_path), has_loss=False)
    assert data.train_x.shape == (16, 1, 4, 5) and data.train_x.dtype == torch.uint8
    assert data.train_y.tolist() == [0] * 8 + [1] * 8 and data.test_y.tolist() == [0] * 3 + [1] * 3
    assert data.train_x[9].unique().tolist() == [201]
    with pytest.warns(UserWarning, match="There is no test set: 3 of 16 samples are held out as one"):
        alone = data_of(str(tmp_path / "train"), has_loss=False)
    assert len(alone.train_x) == 13 and len(alone.test_x) == 3
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no picture")
    with pytest.raises(CompareError, match=r"0\.png cannot be read as a picture"):
        data_of(str(tmp_path), has_loss=False)


def test_one_torch_dataset_gives_a_fifth_for_the_test():
    with pytest.warns(UserWarning, match="12 of 60 samples"):
        data = data_of(Pairs(X, CLASSES), has_loss=False)
    assert (
        len(data.train_x) == 48 and len({tuple(row) for row in torch.cat([data.train_x, data.test_x]).tolist()}) == 60
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.output = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.output(self.lstm(x.unflatten(1, (2, 3)))[0][:, -1])


@pytest.mark.slow
def test_a_recurrent_network_is_compared_and_what_is_finished_stays(tmp_path):
    options = {"methods": ("standard",), "starts": ("none",), "out": tmp_path, **QUICK}
    result = varprop_lab.compare(Recurrent, halves(X, CLASSES), **options)
    assert len(result.outcomes) == 1
    assert varprop_lab.compare(Recurrent, halves(X, CLASSES), resume=True, **options).outcomes == result.outcomes


@pytest.mark.slow
def test_several_jobs_find_the_same_numbers_for_a_model_loss_and_optimizer_in_a_file(own, tmp_path):
    functions = {name: f"{own}:{name}" for name in ("loss", "optimizer")}
    options = {"methods": ("standard", "analytic"), "starts": ("none",), **functions, **QUICK}
    found = [
        varprop_lab.compare(f"{own}:model", f"{own}:data", jobs=jobs, out=tmp_path / str(jobs), **options).outcomes
        for jobs in (1, 2)
    ]
    one, two = ([replace(outcome, seconds=0.0) for outcome in outcomes] for outcomes in found)
    assert one == two and len(one) == 2


def test_the_bound_of_a_search_is_moved_as_long_as_the_best_rate_lies_there(tmp_path):
    """One epoch of four steps: the loss falls with the rate far beyond the usual bound of 0.01."""
    options = {"methods": ("standard",), "starts": ("none",), **QUICK}
    (fixed,) = varprop_lab.compare(table_model, halves(X, CLASSES), lr_max=1e-2, out=tmp_path / "a", **options).outcomes
    (moved,) = varprop_lab.compare(table_model, halves(X, CLASSES), out=tmp_path / "b", **options).outcomes
    assert fixed.search.at_bound and fixed.search.lr <= 1e-2 and fixed.bound == 1e-2
    assert not moved.search.at_bound and moved.search.lr > 1e-2 and moved.bound > 1e-2
    assert moved.search.trace[: len(fixed.search.trace)] == fixed.search.trace
    assert moved.search.loss == min(loss for _, loss in moved.search.trace) < fixed.search.loss


OF_THE_PAPER = """
import sys, torch, varprop_lab
from torch import nn

x, y = torch.randn(40, 6), torch.randint(2, (40,))
result = varprop_lab.compare(
    lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (x, y, x, y),
    methods=("standard",), starts=("none",), epochs=1, batch_size=20, device="cpu",
)
assert str(result) and result.report().is_file()
print(*(name for name in sys.modules if name.startswith("varprop_lab.paper")))
"""


@pytest.mark.slow
def test_a_comparison_imports_nothing_of_the_paper():
    done = subprocess.run([sys.executable, "-c", OF_THE_PAPER], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
