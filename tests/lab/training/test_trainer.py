import copy
import math

import pytest
import torch
import torch.nn.functional as F

import varprop as vp
from varprop_lab import batches
from varprop_lab.protocol import (
    DECAY,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    TRAIN_STILL_LOSS,
    UNIT_NORM,
    VALID_ACCURACY,
    VALID_BATCH_ACCURACY,
    VALID_BATCH_LOSS,
    VALID_LOSS,
    Cell,
)
from varprop_lab.training import Trainer

from .. import tiny


def cell(method="standard", start="none", **others):
    return Cell("tiny", method, start, 0, batch_size=16, **others)


def tick(steps):
    assert steps > 0


class Epochs:
    """Iterated once an epoch, as a DataLoader is, with the batches of the epoch whose turn it is."""

    def __init__(self, source):
        self.source, self.next = source, 0

    def __len__(self):
        return self.source.steps

    def __iter__(self):
        self.next += 1
        for images, labels in self.source.chunks(self.next - 1):
            yield from zip(images.double(), labels, strict=True)


def test_the_objective_is_that_of_the_library():
    task = tiny.task()
    training = Trainer(task, cell())
    training.reset(3e-2)
    for number in range(3):
        training.epoch(number, tick)
    model = task.start(cell()).model
    objective = vp.training_objective(
        model,
        torch.optim.Adam,
        Epochs(task.batches(0, 16)),
        torch.nn.functional.cross_entropy,
        epochs=3,
        schedule=lambda epoch: 0.96**epoch,
    )
    assert training.loss() == pytest.approx(objective(3e-2), rel=1e-12)


def test_training_again_gives_the_same_to_the_last_bit():
    training = Trainer(tiny.task(), cell("batch"))

    def loss():
        training.reset(1e-2)
        training.epoch(0, tick)
        training.epoch(1, tick)
        return training.loss()

    assert loss() == loss()


@pytest.mark.parametrize(("method", "variant"), [("batch", ""), ("weight", DECAY), ("analytic", UNIT_NORM)])
def test_training_goes_on_from_a_kept_state(method, variant):
    training = Trainer(tiny.task(), cell(method, "bn", variant=variant))
    training.reset(1e-2)
    training.epoch(0, tick)
    kept = {name: tensor.clone() for name, tensor in training.state().items()}
    training.epoch(1, tick)
    wanted = training.loss(), training.measurements(1)
    training.load_(1e-2, kept)
    training.epoch(1, tick)
    assert (training.loss(), training.measurements(1)) == wanted


def test_it_learns_and_says_what_it_measures():
    training = Trainer(tiny.task(dtype=torch.float32), cell("analytic", "ap2"))
    training.reset(3e-2)
    for number in range(6):
        training.epoch(number, tick)
    curve = training.measurements(5)
    assert set(curve) == {TRAIN_LOSS, TRAIN_EVAL_LOSS, TRAIN_STILL_LOSS, VALID_LOSS, VALID_ACCURACY}
    assert curve[TRAIN_LOSS] < 0.8 * math.log(3)
    loss, accuracy = training.test()
    assert loss < math.log(3) and accuracy > 0.5


@pytest.mark.parametrize("method", ("batch", "analytic"))
def test_the_training_set_is_measured_in_evaluation_mode(method):
    training = Trainer(tiny.task(), cell(method, "ap2"))
    training.reset(1e-2)
    training.epoch(0, tick)
    curve = training.measurements(0)
    images, labels = zip(*training.batches.chunks(0, batches.MEASURE), strict=True)
    x, y = torch.cat(images).flatten(0, 1).double(), torch.cat(labels).flatten()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(training.model.eval()(x), y)
    assert curve[TRAIN_EVAL_LOSS] == pytest.approx(float(expected), rel=1e-12)
    assert curve[TRAIN_EVAL_LOSS] != pytest.approx(curve[TRAIN_LOSS], rel=1e-3)


def test_the_training_set_is_measured_without_offsets_too():
    task = tiny.task(data=tiny.dataset(160), augmentation=batches.Augmentation(shift=1))
    training = Trainer(task, cell("standard", "ap2"))
    training.reset(1e-2)
    training.epoch(0, tick)
    curve = training.measurements(0)
    chosen = task.split(0)[0]
    x = batches.scaled(task.dataset.train_x[chosen]).double()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(training.model.eval()(x), task.dataset.train_y[chosen])
    assert len(chosen) % training.cell.batch_size == 0  # else the first samples of an epoch count twice
    assert curve[TRAIN_STILL_LOSS] == pytest.approx(float(expected), rel=1e-9)
    assert curve[TRAIN_STILL_LOSS] != pytest.approx(curve[TRAIN_EVAL_LOSS], rel=1e-3)


def test_images_without_offsets_are_measured_once():
    still = tiny.task(augmentation=batches.Augmentation(noise_variance=0.1))
    training = Trainer(still, cell("standard", "none"))
    training.reset(1e-2)
    training.epoch(0, tick)
    assert TRAIN_STILL_LOSS not in training.measurements(0)


def test_batch_norm_is_validated_with_the_statistics_of_batches_too():
    training = Trainer(tiny.task(data=tiny.dataset(train=500)), cell("batch"))
    training.reset(1e-2)
    training.epoch(0, tick)
    before = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    curve = training.measurements(0)
    x, y = training.task.validation(0)
    assert len(x) == 50  # three batches of 16, and two images that are left out
    model = copy.deepcopy(training.model).train()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x[i : i + 16].double()), y[i : i + 16]) for i in (0, 16, 32)]
    assert curve[VALID_BATCH_LOSS] == pytest.approx(float(sum(losses)) / 3, rel=1e-12)
    assert curve[VALID_BATCH_LOSS] != pytest.approx(curve[VALID_LOSS], rel=1e-3)
    assert 0 < curve[VALID_BATCH_ACCURACY] <= 1
    for name, buffer in training.model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_divergence_is_a_loss_that_is_not_finite():
    training = Trainer(tiny.task(dtype=torch.float32), cell())
    training.reset(1e30)
    training.epoch(0, tick)
    assert not math.isfinite(training.loss())
    training.reset(1e-3)
    training.epoch(0, tick)
    assert math.isfinite(training.loss())


def test_batches_do_not_depend_on_anything_but_seed_and_epoch():
    source = tiny.task().batches(0, 16)
    first, again = (list(source.chunks(2)) for _ in range(2))
    other = list(source.chunks(3))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][1], other[0][1])


def test_an_epoch_holds_every_training_image_and_fills_its_last_batch_up():
    task = tiny.task()
    source = task.batches(0, 16)
    order = source._order(0).flatten()
    count = len(source.indices)
    assert source.steps == math.ceil(count / 16)
    assert sorted(order[:count].tolist()) == list(range(count))
    assert torch.equal(order[count:], order[: len(order) - count])


def test_images_for_evaluation_keep_the_noise_and_nothing_else():
    task = tiny.task()
    images, _ = task.validation(0)
    plain = task.dataset.train_x[task.split(0)[1]].float() / 255
    difference = images - plain
    assert difference.var() == pytest.approx(0.05, rel=0.2)
    assert abs(float(difference.mean())) < 0.05


def as_it_is(step, images, labels):
    return lambda x, y: step(x, y)


def with_old_inputs(step, images, labels):
    return lambda x, y: step(images, labels)


def with_old_parameters(step, images, labels):
    trainer = step.__self__
    model = copy.deepcopy(trainer.model)

    def wrong(x, y):
        step(x, y)
        trainer.running.reset_()
        trainer.running.update(F.cross_entropy(model(x), y).detach())

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("method", ("standard", "batch", "analytic"))
@pytest.mark.parametrize("wrong", (with_old_inputs, with_old_parameters))
def test_a_captured_step_that_computes_something_else_is_refused(monkeypatch, method, wrong):
    monkeypatch.setattr("varprop_lab.training.captured_step", wrong)
    with pytest.raises(RuntimeError, match=f"The training step of {method}.* does not compute what the model does"):
        Trainer(tiny.task(), cell(method, "ap2"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ("standard", "batch", "analytic"))
def test_trying_a_captured_step_leaves_no_trace(monkeypatch, method):
    plain = Trainer(tiny.task(), cell(method, "ap2"))
    monkeypatch.setattr("varprop_lab.training.captured_step", as_it_is)
    tried = Trainer(tiny.task(), cell(method, "ap2"))
    for trainer in (plain, tried):
        trainer.reset(1e-2)
        trainer.epoch(0, tick)
    assert plain.loss() == tried.loss()
    for name, tensor in plain.state().items():
        assert torch.equal(tensor, tried.state()[name]), name
