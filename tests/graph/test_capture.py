"""A capture names modules by their paths; it leaves other threads and what hooks keep alone, or says so."""

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx import proxy

import varprop as vp
from varprop.graph import tracing
from varprop.graph.capture import of_fixed_sizes
from varprop.graph.tracing import HookWarning, only_user_frames

UNIT = vp.Moments(0.0, 1.0)


class TrainsElsewhere(nn.Module):
    """While it is captured, another thread trains a batch norm."""

    def __init__(self, other):
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(3), other

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.other[0](torch.ones(4, 3)))
        thread.start()
        thread.join()
        return self.norm(x)


def test_a_batch_norm_that_another_thread_trains_keeps_its_statistics_current():
    other = nn.BatchNorm1d(3)
    vp.capture(TrainsElsewhere((other,)), torch.zeros(1, 3))
    assert int(other.num_batches_tracked) > 0
    torch.testing.assert_close(other.running_mean, torch.full((3,), 1 - 0.9 ** int(other.num_batches_tracked)))


class Shifted(nn.Module):
    """Adds in a helper, which is not where a reader of a report looks first."""

    def shifted(self, x):
        return x + 1

    def forward(self, x):
        return self.shifted(x)


def test_nodes_know_the_line_of_the_users_forward():
    traced = proxy.CapturedTraceback
    add, *_ = [node for node in vp.capture(nn.Sequential(Shifted()), (1, 3)).nodes if "add" in str(node.target)]
    assert re.fullmatch(r".*test_capture\.py:\d+ in forward: return self\.shifted\(x\)", add.line)
    with pytest.raises(vp.CaptureError):
        vp.capture(nn.Linear(3, 4), (1, 5))
    assert proxy.CapturedTraceback is traced


def test_traces_of_another_thread_stay_whole_meanwhile():
    with only_user_frames(), ThreadPoolExecutor(1) as other:
        frames = other.submit(lambda: proxy.CapturedTraceback.extract().summary()).result()
        assert len(frames) > 1 and not proxy.CapturedTraceback.extract().summary()


def test_a_torch_without_the_name_of_its_traces_is_captured_all_the_same(monkeypatch):
    program = vp.capture(nn.Linear(3, 4), (1, 3))
    monkeypatch.setattr(tracing, "proxy", object())
    assert [node.target for node in vp.capture(nn.Linear(3, 4), (1, 3)).nodes] == [n.target for n in program.nodes]


def test_a_hook_that_needs_values_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def prints(module, inputs, output):
        print(float(output.sum()))

    model[0].register_forward_hook(prints)
    with pytest.raises(vp.CaptureError, match=r"prints \(.*test_capture\.py:\d+\), registered on '0', is a hook"):
        vp.capture(model, (1, 3))


def test_a_hook_that_changes_the_output_belongs_to_the_model():
    model = nn.Sequential(nn.Linear(3, 4))
    plain = vp.propagate(model, vp.Moments(0.0, 1.0), example=(1, 3)).output
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = vp.propagate(model, vp.Moments(0.0, 1.0), example=(1, 3)).output
    assert torch.allclose(hooked.var, 4 * plain.var)


def test_a_hook_that_only_looks_is_named_and_stays():
    model, kept = nn.Sequential(nn.Linear(3, 4)), []

    def keeps(module, inputs, output):
        kept.append(output)

    model[0].register_forward_hook(keeps)
    with pytest.warns(HookWarning, match="must not keep any: keeps on '0'"):
        vp.capture(model, (1, 3))
    assert list(model[0]._forward_hooks.values()) == [keeps]
    kept.clear()
    assert torch.equal(model(torch.ones(1, 3)), kept[0])


def test_hooks_of_the_model_and_of_torch_are_not_named(recwarn):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    vp.capture(model, (1, 3))
    assert not [warning for warning in recwarn if issubclass(warning.category, HookWarning)]


class ActorCritic(nn.Module):
    """Draws no action itself, but lets a distribution have the mean and the deviation."""

    def __init__(self):
        super().__init__()
        self.mean, self.value, self.deviation = nn.Linear(4, 2), nn.Linear(4, 1), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), self.deviation.exp()).mean, self.value(x)


def test_distributions_do_not_look_at_values_while_a_model_is_captured(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile has it off for good
    model = ActorCritic()
    assert vp.propagate(model, vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))).output[0].mean.shape == (1, 2)
    with pytest.raises(ValueError, match="scale"):  # but they do again afterwards
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def went_through_a_compiled_model(x, axis):
    """Of an input that is kept for the backward pass torch 2.11 notes on the tensor itself that its axis may vary."""
    torch._dynamo.reset()
    torch.compile(nn.Linear(x.shape[1], 2), backend="aot_eager", dynamic=True)(x)


MARKS = (torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic, went_through_a_compiled_model)


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: mark.__name__)
def test_axes_marked_for_the_compiler_have_the_length_of_the_example(mark):
    example = torch.zeros(5, 3)
    mark(example, 0)
    marks = dict(vars(example))
    program = vp.capture(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), example)
    assert [[type(extent) for extent in node.info.shape] for node in program.nodes] == [[int, int]] * 2
    assert vars(example) == marks


class Slope(nn.Module):
    """Its output is a derivative by its input."""

    def forward(self, x):
        return torch.autograd.grad(x.sin().sum(), x)[0]


def test_gradients_of_an_example_are_there_while_the_model_is_captured():
    leaf = torch.zeros(5, 3, requires_grad=True)
    made = 2 * leaf
    for example in (leaf, made):
        program = vp.capture(Slope(), example)
        assert torch.ops.aten.cos.default in [node.target for node in program.nodes]
    vp.capture(nn.ReLU(inplace=True), made)
    with pytest.raises(vp.CaptureError, match="a leaf Variable"):  # as torch would refuse it
        vp.capture(nn.ReLU(inplace=True), leaf)


@torch.no_grad()
def test_gradients_of_an_example_are_asked_for_where_none_are_recorded():
    leaf = torch.zeros(5, 3, requires_grad=True)
    with torch.enable_grad():
        made = 2 * leaf
    for example in (leaf, made):
        again = of_fixed_sizes(example)
        assert again.requires_grad and again.is_leaf == example.is_leaf


@pytest.mark.parametrize(
    "select",
    [
        lambda x, mask: x[:, mask],
        lambda x, mask: x.masked_select(mask).view(1, 4),
        lambda x, mask: x[:, mask.nonzero().squeeze(1)],
        lambda x, mask: x.repeat_interleave(mask.long(), 1),
    ],
    ids=["index", "masked_select", "nonzero", "repeat_interleave"],
)
def test_what_a_constant_mask_selects_has_known_extents(select):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))

        def forward(self, x):
            return torch.relu(2 * select(x, self.mask)).sum(1)

    mean = torch.linspace(-1, 1, 6)
    chosen = vp.propagate(Masked(), vp.Moments(mean.view(1, 6), 1.0)).output
    direct = vp.propagate(Relus(), vp.Moments(mean[Masked().mask].view(1, 4), 1.0)).output
    torch.testing.assert_close((chosen.mean, chosen.var), (direct.mean, direct.var))
    alike = vp.propagate(Masked(), vp.Moments(0.0, 1.0), (1, 6)).output
    direct = vp.propagate(Relus(), vp.Moments(0.0, 1.0), (1, 4)).output
    torch.testing.assert_close((alike.mean, alike.var), (direct.mean, direct.var))


class Relus(nn.Module):
    def forward(self, x):
        return torch.relu(2 * x).sum(1)


class Remembering(nn.Module):
    """Keeps its state, what it has attended to, and every output it made."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 2)
        self.state, self.made, self.last = None, [], {}

    def forward(self, x):
        before = torch.zeros(len(x), 8) if self.state is None else self.state
        self.state = self.cell(x, before)
        self.made.append(self.out(self.state))
        self.last["out"] = self.made[-1]
        return self.made[-1]


@pytest.mark.parametrize("look", [vp.normalize, vp.inspect, vp.init_, vp.propagate])
def test_what_a_model_keeps_in_attributes_is_left_alone(look):
    """It was a tensor without values afterwards, and so was all that the model gave from then on."""
    model = Remembering()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vp.PlainWarning)
        found = look(model, vp.Moments(torch.zeros(1, 6), 1.0))
    assert model.state is None and model.made == [] and model.last == {}
    called = found if isinstance(found, nn.Module) else model
    assert called(torch.ones(2, 6)).tolist() != called(torch.ones(2, 6)).tolist()


class Score(nn.Module):
    """The gradient of an energy by its argument, as in score matching."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_gradients_taken_inside_a_model_are_named():
    with pytest.raises(
        vp.CaptureError, match=r"Score does something .*, such as torch.autograd.grad or a write to `.data` inside"
    ):
        vp.propagate(Score(), vp.Moments(torch.zeros(1, 6), 1.0))


class LayerDrop(nn.Module):
    """Layers that are skipped at random in training, as transformers writes it in two ways."""

    def __init__(self, layerdrop, always_draws):
        super().__init__()
        self.layerdrop, self.always_draws = layerdrop, always_draws
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if self.always_draws:
                skips = self.training and torch.rand([]) < self.layerdrop
                if not skips:
                    x = x + layer(x)
            elif not self.training or torch.rand([]) >= self.layerdrop:
                x = x + layer(x)
        return x


@pytest.mark.parametrize("always_draws", [False, True])
def test_layers_skipped_at_random_get_a_sentence_and_its_advice_helps(always_draws):
    model = LayerDrop(0.3, always_draws).train()
    with pytest.raises(vp.CaptureError, match=r"if torch.rand (<|>=) 0.3.*model.eval\(\).*layerdrop = 0"):
        vp.propagate(model, UNIT, (1, 8))
    outputs = [vp.propagate(model.eval(), UNIT, (1, 8)).output.var]
    model.layerdrop = 0
    outputs.append(vp.propagate(model.train(), UNIT, (1, 8)).output.var)
    torch.testing.assert_close(*outputs)
    model.layerdrop = 1.0
    assert (vp.propagate(model, UNIT, (1, 8)).output.var == 1).all()


def test_layers_skipped_at_random_are_normalized_as_in_evaluation():
    model = LayerDrop(0.3, True)
    with pytest.warns(UserWarning, match="LayerDrop.*its statistics are those of evaluation mode in training, too"):
        normalized = vp.normalize(model, UNIT, example=(1, 8), init="preserve")
    x = torch.randn(5, 8)
    torch.testing.assert_close(normalized.eval()(x), model.eval()(x))
    normalized.train()(x).sum().backward()


def test_another_choice_by_values_is_not_taken_for_a_random_one():
    class Masked(nn.Module):
        def forward(self, x):
            x = x * (torch.rand(1) < 0.5)
            return x if x.sum() > 0 else -x

    with pytest.raises(vp.CaptureError, match="branches on the values of its input"):
        vp.propagate(Masked(), UNIT, (1, 8))


class Inner(nn.Module):
    """A layer and an activation, which may be another module's as well."""

    def __init__(self, activation):
        super().__init__()
        self.layers, self.activation = nn.ModuleList([nn.Linear(4, 4)]), activation

    def forward(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def test_modules_are_known_by_their_whole_paths_where_some_hold_one_twice():
    torch.manual_seed(0)
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(Inner(shared), Inner(shared)), Inner(shared))
    apart = nn.Sequential(nn.Sequential(Inner(nn.ReLU()), Inner(nn.ReLU())), Inner(nn.ReLU()))
    apart.load_state_dict(model.state_dict())
    assert str(vp.propagate(model, UNIT, (1, 4))) == str(vp.propagate(apart, UNIT, (1, 4)))
    paths = [[call.path for call in node.stack] for node in vp.capture(model, (1, 4)).nodes]
    assert paths[0] == ["", "0", "0.0", "0.0.layers.0"]
    assert paths[-1] == ["", "1", "1.activation"]
    x, (normalized, other) = torch.randn(5, 4), (vp.normalize(m, UNIT, example=(1, 4)) for m in (model, apart))
    assert list(normalized.state_dict()) == list(other.state_dict())
    assert torch.equal(normalized(x), other(x))
    assert str(vp.propagate(normalized, UNIT, (1, 4))) == str(vp.propagate(other, UNIT, (1, 4)))
