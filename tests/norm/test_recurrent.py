"""Recurrent layers with normalized gates: exact in and out, invariant, and stationary as predicted."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import varprop as vp
from tests.models import LSTMClassifier
from tests.norm.networks import both_forms
from varprop.norm.recurrent import NormalizedRecurrent, gate_terms, in_one_chunk, row_terms, with_centred_gates

INPUTS, HIDDEN = 5, 6
CELLS = {
    "tanh": lambda **kw: nn.RNN(INPUTS, HIDDEN, nonlinearity="tanh", **kw),
    "relu": lambda **kw: nn.RNN(INPUTS, HIDDEN, nonlinearity="relu", **kw),
    "lstm": lambda **kw: nn.LSTM(INPUTS, HIDDEN, **kw),
    "gru": lambda **kw: nn.GRU(INPUTS, HIDDEN, **kw),
}
SETTINGS = {
    "plain": {},
    "no bias": {"bias": False},
    "deep": {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    "batch first": {"num_layers": 2, "batch_first": True},
}
VARIANTS = {f"{cell}, {name}": (cell, settings) for cell in CELLS for name, settings in SETTINGS.items()}
VARIANTS["lstm, projected"] = ("lstm", {"num_layers": 2, "proj_size": 3})
all_variants = pytest.mark.parametrize("name", VARIANTS)
all_cells = pytest.mark.parametrize("cell", CELLS)
# The settings of a layer and the form of its rows do not meet in the code: every cell is tried in both forms, and each
# setting once; all of them together are slow.
FORMS = [(f"{cell}, {name}", form) for cell in CELLS for name, form in (("deep", "deep"), ("plain", "paper"))]
FORMS += [("lstm, projected", "deep"), ("gru, no bias", "deep"), ("tanh, batch first", "deep")]
FORMS += [
    pytest.param(name, form, marks=pytest.mark.slow)
    for name in VARIANTS
    for form in ("deep", "paper")
    if (name, form) not in FORMS
]
all_forms = pytest.mark.parametrize(("name", "form"), FORMS)


def build(cell: str, **settings) -> nn.RNNBase:
    torch.manual_seed(1)
    return CELLS[cell](**settings).double().eval()


def variant(name: str) -> nn.RNNBase:
    cell, settings = VARIANTS[name]
    return build(cell, **settings)


def example(steps: int = 7, batch: int = 4) -> Tensor:
    torch.manual_seed(2)
    return (torch.randn(steps, batch, INPUTS) * 0.8 + 0.7).double()


def moments() -> vp.Moments:
    mean = torch.linspace(-1, 2, INPUTS).double()
    return vp.Moments(mean[None, None], (0.5 + mean.square())[None, None])


def normalized(layer: nn.Module, init: str = "preserve", **more) -> nn.Module:
    return vp.normalize(layer, moments(), example=example(), init=init, **more)


@functools.cache
def _site(name: str, init: str, form: str) -> nn.Module:
    return normalized(variant(name), init, form=form)


def site_of(name: str, init: str = "preserve", form: str = "paper") -> nn.Module:
    return copy.deepcopy(_site(name, init, form))


def folded(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vp.fold(model)


def flat(result) -> Tensor:
    output, states = result
    output = output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output
    states = states if isinstance(states, tuple) else (states,)
    return torch.cat([part.flatten() for part in (output, *states)]).detach()


def same(a, b, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=tolerance)


def suffixes(layer: nn.RNNBase) -> list[str]:
    return [name.removeprefix("weight_ih_") for name, _ in layer.named_parameters() if name.startswith("weight_ih")]


@pytest.mark.slow
@all_variants
def test_preserve_and_fold_are_exact(name):
    layer, x, site = variant(name), example(), site_of(name)
    assert isinstance(site, NormalizedRecurrent) and isinstance(site, type(layer))
    same(layer(x), site(x))
    same(layer(x), folded(site)(x))


@pytest.mark.slow
@all_variants
def test_preserve_is_exact_in_float32(name):
    layer, x = variant(name).float(), example().float()
    site = vp.normalize(layer, moments().to(torch.float32), example=x, init="preserve")
    same(layer(x), site(x), 1e-5)
    same(layer(x), folded(site)(x), 1e-5)


@pytest.mark.slow
@both_forms
@all_variants
def test_the_folded_state_dict_loads_into_the_original_class(name, form):
    layer, x, site = variant(name), example(), site_of(name, "project", form)
    plain = folded(site)
    assert type(plain) is type(layer) and plain.bias is True and vars(plain).keys() == vars(layer).keys()
    cell, settings = VARIANTS[name]
    fresh = CELLS[cell](**{**settings, "bias": True}).double().eval()
    assert list(plain.state_dict()) == list(fresh.state_dict())
    fresh.load_state_dict(plain.state_dict(), strict=True)
    same(site(x), fresh(x))


def test_a_layer_without_bias_gains_one_and_fold_says_so():
    model = nn.Sequential(build("gru", bias=False))
    with pytest.warns(UserWarning, match="had no bias and have one now: 0"):
        plain = vp.fold(normalized(model, "project"))
    assert plain[0].bias and plain[0].bias_ih_l0.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.fold(normalized(nn.Sequential(build("gru")), "project"))


def test_one_number_stands_for_all_inputs():
    layer, x = build("lstm"), example()
    one, each = (vp.Moments(*(torch.full(shape, v).double() for v in (0.7, 0.6))) for shape in ((), (1, 1, INPUTS)))
    same(*(vp.normalize(layer, given, example=x)(x) for given in (one, each)))


def test_parameters_are_named_as_in_the_plain_layer():
    site = normalized(build("gru", bidirectional=True))
    kinds = ("weight_ih", "weight_hh", "scale", "shift")
    assert {name for name, _ in site.named_parameters()} == {f"{k}_l0{d}" for k in kinds for d in ("", "_reverse")}
    assert site.scale_l0.shape == (4 * HIDDEN,)


@all_cells
def test_all_ways_to_call_it_stay(cell):
    layer, x = build(cell, num_layers=2), example()
    site = normalized(layer)
    state = layer(x)[1]
    same(layer(x, state), site(x, state))
    packed = pack_padded_sequence(x, [3, 7, 2, 5], enforce_sorted=False)
    same(layer(packed), site(packed))
    same(layer(x[:, 0]), site(x[:, 0]))
    with pytest.raises(RuntimeError, match="input_size"):
        site(x[..., 1:])


class OfLengths(nn.Module):
    """Packs what it is given where it is given lengths."""

    def __init__(self, cell: str, **settings) -> None:
        super().__init__()
        self.gates = CELLS[cell](**settings)
        self.head = nn.Linear(HIDDEN * (1 + self.gates.bidirectional), 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.head(self.gates(x)[0])
        packed = self.gates(pack_padded_sequence(x, lengths, enforce_sorted=False))[0]
        return self.head(pad_packed_sequence(packed)[0])


@pytest.mark.slow
@pytest.mark.compatibility("packed sequences")
@all_cells
@pytest.mark.parametrize("settings", ({}, {"bidirectional": True, "num_layers": 2}), ids=("plain", "deep"))
def test_packed_sequences_have_the_numbers_of_each_by_itself(cell, settings):
    torch.manual_seed(0)
    model = normalized(OfLengths(cell, **settings).double().eval(), "project")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, lengths = example(), [3, 7, 2, 5]
    together, folded = model(x, lengths), vp.fold(model)(x, lengths)
    assert torch.allclose(together, folded, rtol=1e-12, atol=1e-13)
    alone = [model(x[:length, k : k + 1])[:, 0] for k, length in enumerate(lengths)]
    for k, length in enumerate(lengths):
        assert torch.allclose(together[:length, k], alone[k], rtol=1e-12, atol=1e-13)
    wanted = list(model.parameters())
    loss = sum(together[:length, k].square().sum() for k, length in enumerate(lengths))
    ours = torch.autograd.grad(loss, wanted)
    theirs = torch.autograd.grad(sum(each.square().sum() for each in alone), wanted)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(ours, theirs, strict=True))


def test_a_model_that_only_packs_is_told_how_to_be_captured():
    lengths = torch.tensor([3, 7, 2, 5])
    with pytest.raises(vp.CaptureError, match=r"packs sequences inside.* let it take padded sequences"):
        vp.normalize(OfLengths("lstm").double(), (moments(), lengths), example=(example(), lengths))


class Stepwise(nn.Module):
    """A recurrence written by hand around one of torch's cells."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x[:3]:
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", (nn.LSTMCell, nn.GRUCell, nn.RNNCell))
def test_cells_stay_plain_and_are_named(kind):
    torch.manual_seed(0)
    plain = Stepwise(kind).double().eval()
    with pytest.warns(vp.PlainWarning, match=rf"stay as they are: 'cell' \({kind.__name__}\)"):
        model = normalized(plain)
    assert type(model.cell) is kind and type(model.head) is not nn.Linear
    assert torch.allclose(model(example()), plain(example()), rtol=1e-12, atol=1e-13)


# --- invariance ---


@all_forms
def test_the_gradient_is_orthogonal_to_the_weights_of_every_gate(name, form):
    site = site_of(name, "project", form)
    output, _ = site(example())
    (output * torch.linspace(-1, 3, output.numel()).view_as(output).double()).sum().backward()
    for suffix in suffixes(site):
        pair = [getattr(site, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh")]
        products = gate_terms(site.mode, *((w * w.grad).sum(1) for w in pair)).detach()
        sizes = gate_terms(site.mode, *((w.norm(dim=1) * w.grad.norm(dim=1)) for w in pair)).detach()
        assert sizes.any() and (products.abs() <= 1e-12 * sizes).all()
        if form == "deep":
            assert (gate_terms(site.mode, *(w.grad.sum(1) for w in pair)).abs() <= 1e-12 * sizes.max()).all()


@all_variants
def test_a_number_added_to_a_centred_gates_weights_does_not_matter(name):
    site, x = site_of(name, "project", "deep"), example()
    before = site(x)
    with torch.no_grad():
        for suffix in suffixes(site):
            gates = torch.linspace(-3, 5, len(getattr(site, f"scale_{suffix}"))).double()
            for kind, rows in zip(("weight_ih", "weight_hh"), row_terms(site.mode, gates), strict=True):
                getattr(site, f"{kind}_{suffix}").add_(rows[:, None])
    same(before, site(x))


def test_parts_of_a_candidate_that_have_one_weight_stay():
    torch.manual_seed(0)
    one = torch.ones(1, 1, 1).double()
    site = vp.normalize(nn.GRU(1, 4).double(), vp.Moments(0 * one, one), form="deep")
    w_ih, w_hh = with_centred_gates(site.mode, site.weight_ih_l0, site.weight_hh_l0)
    assert torch.equal(w_ih[8:], site.weight_ih_l0[8:])
    torch.testing.assert_close(w_hh[8:].sum(1), torch.zeros(4).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(w_ih[:8].sum(1) + w_hh[:8].sum(1), torch.zeros(8).double(), rtol=0, atol=1e-14)


@all_cells
def test_equal_weights_of_a_gate_are_named_and_harmless(cell):
    layer, site = build(cell), site_of(f"{cell}, plain", "project", "deep")
    for each in (layer, site):
        with torch.no_grad():
            each.weight_ih_l0[1] = each.weight_hh_l0[1] = 0.1
    with pytest.raises(ValueError, match=r"Gate 1 \(l0\) of '' has only equal weights"):
        normalized(layer, "project", form="deep")
    output, _ = site(example())
    output.sum().backward()
    assert output.isfinite().all() and all(p.grad.isfinite().all() for p in site.parameters())


@pytest.mark.parametrize(("saved", "own"), (("deep", "paper"), ("paper", "deep")))
def test_a_checkpoint_of_the_other_form_is_refused(saved, own):
    state = site_of("gru, plain", "project", saved).state_dict()
    with pytest.raises(ValueError, match="in another form"):
        site_of("gru, plain", "project", own).load_state_dict(state)


@pytest.mark.slow
@all_cells
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_common_factor_of_a_gates_weights_does_not_matter(cell, factor):
    layer = build(cell, num_layers=2).float()
    site, x = vp.normalize(layer, moments().to(torch.float32), example=example().float()), example().float()
    before = site(x)
    gates = torch.logspace(-1, 1, len(site.scale_l0)) * factor
    with torch.no_grad():
        for kind, rows in zip(("weight_ih_l1", "weight_hh_l1"), row_terms(site.mode, gates), strict=True):
            getattr(site, kind).mul_(rows[:, None])
    same(before, site(x), 1e-5)


def test_the_sign_of_a_scale_turns_the_gates_weights():
    site = normalized(build("lstm"), "project")
    plain = folded(site)
    with torch.no_grad():
        site.scale_l0.neg_()
    torch.testing.assert_close(folded(site).weight_hh_l0, -plain.weight_hh_l0)


@all_forms
def test_unit_norm_changes_no_output(name, form):
    site, x = site_of(name, "project", form), example()
    before = site(x)
    vp.unit_norm_(site)
    same(before, site(x))
    pair = [getattr(site, f"{kind}_l0").detach().square().sum(1) for kind in ("weight_ih", "weight_hh")]
    torch.testing.assert_close(gate_terms(site.mode, *pair), torch.ones_like(site.scale_l0))


def test_decay_spares_all_but_a_projection():
    site = site_of("lstm, projected", "project")
    groups = {group["weight_decay"]: group["params"] for group in vp.param_groups(site, 0.1)}
    assert {id(p) for p in groups[0.1]} == {id(p) for n, p in site.named_parameters() if n.startswith("weight_hr")}


# --- statistics ---


def gates_of(layer: nn.RNNBase, x: Tensor) -> Tensor:
    """The pre-activations of a plain layer over time: W_ih x + W_hh h + b; A and B apart for a GRU."""
    output, _ = layer(x)
    before = torch.cat([torch.zeros_like(output[:1]), output[:-1]])
    from_input = x @ layer.weight_ih_l0.T + layer.bias_ih_l0
    return gate_terms(layer.mode, from_input, before @ layer.weight_hh_l0.T + layer.bias_hh_l0).detach()


@all_cells
def test_projected_gates_have_mean_zero_and_std_one(cell):
    """After 60 steps on independent Gaussian input, over samples: the median over the units of each kind of gate."""
    torch.manual_seed(3)
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(cell)
    layer = (kind(32, 64) if kind else nn.RNN(32, 64, nonlinearity=cell)).double()
    mean, var = torch.randn(32).double(), 0.5 + torch.rand(32).double()
    x = mean + var.sqrt() * torch.randn(60, 400, 32).double()
    site = vp.normalize(layer, vp.Moments(mean[None, None], var[None, None]), example=x[:2, :2])
    for gate in gates_of(vp.fold(site), x)[-1].chunk(4 if kind else 1, -1):
        assert 0.9 <= float(gate.std(0).median()) <= 1.1
        assert float(gate.mean(0).abs().median()) <= 0.1


@all_cells
def test_the_stationary_state_is_the_fixed_point_of_its_own_recursion(cell):
    """Independent gates drawn anew in every step, so that nothing but the formulas is tested."""
    torch.manual_seed(4)
    site = normalized(build(cell), "project")
    count = 40_000
    with torch.no_grad():
        site.scale_l0.copy_(torch.rand_like(site.scale_l0) + 0.5)
        site.shift_l0.copy_(torch.randn_like(site.shift_l0))
        site.shift_l0.clamp_(-1, 1)
    h = c = torch.zeros(count, HIDDEN, dtype=torch.float64)
    for _ in range(30 if cell in ("lstm", "gru") else 1):  # the others keep nothing of a state but its weights
        a = site.shift_l0.detach() + site.scale_l0.detach() * torch.randn(count, len(site.scale_l0)).double()
        if cell == "lstm":
            i, f, g, o = a.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif cell == "gru":
            r, z, n, b = a.chunk(4, -1)
            h = torch.lerp((n + r.sigmoid() * b).tanh(), h, z.sigmoid())
        else:
            h = getattr(a, cell)()
    for (mean, var), drawn in zip(site.states()["l0"], (h, c), strict=False):
        std = var.detach().sqrt()
        assert float(((drawn.mean(0) - mean.detach()) / std).abs().max()) < 0.03
        assert float((drawn.std(0) / std - 1).abs().max()) < 0.03


def test_dropout_between_layers_counts_in_training():
    site = normalized(build("tanh", num_layers=2, dropout=0.5), "project")
    with torch.no_grad():
        site.shift_l0.fill_(1.0)
    evaluation, training = (site.train(mode).folded() for mode in (False, True))
    torch.testing.assert_close(evaluation["weight_ih_l0"], training["weight_ih_l0"])
    (mean, var) = site.states()["l0"][0]
    own = site.states()["l1"][0][1] + 1e-6
    wide = site.weight_ih_l1.square() @ ((var + 0.5 * mean.square()) / 0.5 + 1e-6) + site.weight_hh_l1.square() @ own
    torch.testing.assert_close(training["weight_ih_l1"], site.weight_ih_l1 / wide.sqrt()[:, None])
    assert (training["weight_ih_l1"].abs() < evaluation["weight_ih_l1"].abs()).all()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), ((nn.LSTM, "paper"), (nn.LSTM, "deep"), (nn.GRU, "deep"), (nn.RNN, "deep")))
def test_everything_is_differentiated_through(kind, form):
    ones = torch.ones(1, 1, 2).double()
    site = vp.normalize(kind(2, 2).double(), vp.Moments(ones, ones), form=form)
    names, values = zip(*site.named_parameters(), strict=True)
    x = torch.randn(2, 1, 2).double()

    def run(*tensors):
        return torch.func.functional_call(site, dict(zip(names, tensors, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, tuple(v.detach().requires_grad_() for v in values))


# --- no batch, no state ---


@all_cells
def test_a_batch_of_16_equals_16_batches_of_one(cell):
    site, x = site_of(f"{cell}, plain", "project").train(), example(3, 16)
    together = torch.autograd.grad(site(x)[0].sin().sum(), list(site.parameters()))
    site.zero_grad()
    for one in x.split(1, 1):
        site(one)[0].sin().sum().backward()
    for grad, parameter in zip(together, site.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["tanh, deep", "relu, plain", "lstm, projected", "gru, no bias"])
def test_copies_state_dicts_and_other_parameters(name):
    layer, x, site, other = variant(name), example(), site_of(name), site_of(name, "project")
    deep = site_of(name, "project", "deep")
    for kind in (site, deep):
        for copied in (copy.deepcopy(kind), pickle.loads(pickle.dumps(kind))):
            same(kind(x), copied(x), 0)
            assert copied.centred_rows is (kind is deep)
    site_of(name, "project", "deep").load_state_dict(deep.state_dict(), strict=True)
    expected = other(x)
    same(torch.func.functional_call(site, dict(other.named_parameters()), (x,)), expected, 0)
    same(layer(x), site(x))
    other.load_state_dict(site.state_dict(), strict=True)
    same(site(x), other(x), 0)


@all_cells
def test_dtype_and_flat_weights_follow(cell):
    layer, x, site = build(cell), example().float(), site_of(f"{cell}, plain").float()
    site.flatten_parameters()
    same(site(x), layer.float()(x), 1e-5)
    plain = folded(site)
    assert all(p.dtype is torch.float32 for p in plain.parameters())
    plain.flatten_parameters()
    same(plain.double()(x.double()), layer.double()(x.double()), 1e-5)


@pytest.mark.slow
@all_cells
def test_it_compiles_and_exports(cell):
    """torch itself lets recurrent layers into a compiled graph only with this switch."""
    site, x = site_of(f"{cell}, plain"), example()
    # All operations of the others, backward too, are among those of these two.
    backend = "aot_eager" if cell in ("relu", "gru") else "eager"
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        same(torch.compile(site, backend=backend, fullgraph=True)(x), site(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = torch.export.export(site, (x,), strict=False)
    same(exported.module()(x), site(x))


def test_one_chunk_holds_the_matrices_first():
    """As cuDNN wants them; checked on a GPU by hand, where it warns of any other order."""
    weights = list(site_of("lstm, projected", "project").folded().values())
    chunk = in_one_chunk(weights)
    assert all(torch.equal(a, b) for a, b in zip(chunk, weights, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in chunk}) == 1
    starts = [part.storage_offset() for part in sorted(chunk, key=lambda part: part.ndim == 1)]
    assert starts == sorted(starts)


def test_autocast_leaves_the_statistics_alone():
    site = site_of("lstm, plain").float()
    expected = site.folded()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(value, expected[name]) for name, value in site.folded().items())


# --- whole models ---


class Translator(nn.Module):
    """Two recurrent layers, the second of which starts from the state of the first and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(INPUTS, HIDDEN), nn.GRU(HIDDEN, HIDDEN)
        self.head = nn.Linear(2 * HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen, state = self.encoder(x)
        once, state = self.decoder(seen.tanh(), state)
        twice, state = self.decoder(once, state)
        return self.head(torch.cat([twice, state.expand_as(twice)], -1))


def test_a_classifier_from_end_to_end():
    torch.manual_seed(5)
    model = LSTMClassifier(INPUTS, layers=2).double().eval()
    x = example().transpose(0, 1)
    site = vp.normalize(model, moments(), example=x, init="preserve")
    torch.testing.assert_close(site(x), model(x), rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD(vp.param_groups(site.train(), 0.1), lr=0.1)
    site(x).square().sum().backward()
    optimizer.step()
    plain = vp.fold(site.eval())
    torch.testing.assert_close(plain(x), site(x), rtol=0, atol=1e-12)
    fresh = LSTMClassifier(INPUTS, layers=2).double()
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert not any(type(m).__module__.startswith("varprop") for m in plain.modules())


def test_init_gives_the_head_unit_variance():
    torch.manual_seed(6)
    model = LSTMClassifier(INPUTS, hidden=64, classes=64).double()
    given = moments()
    x = given.mean + given.std * torch.randn(500, 20, INPUTS).double()
    y = vp.init_(model, given, example=x[:2])(x).detach()
    assert 0.9 <= float(y.std(0).median()) <= 1.1
    vp.init_(model, given, example=x[:2], center=False)
    assert not any(p.any() for name, p in model.named_parameters() if "bias" in name)


def test_a_layer_called_twice_and_states_passed_on():
    torch.manual_seed(7)
    model, x = Translator().double().eval(), example()
    site = normalized(model)
    torch.testing.assert_close(site(x), model(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(vp.fold(site)(x), model(x), rtol=0, atol=1e-12)


def test_only_takes_recurrent_layers_too():
    model = LSTMClassifier(INPUTS).double()
    given = {"example": example().transpose(0, 1)}
    taken = [vp.normalize(model, moments(), only=only, **given) for only in ("lstm", "head")]
    assert [isinstance(m.lstm, NormalizedRecurrent) for m in taken] == [True, False]


# --- bad use ---


def test_bad_weights_are_named():
    model = nn.Sequential(build("gru"))
    with torch.no_grad():
        model[0].weight_hh_l0[2 * HIDDEN + 1] = 0.0
    with pytest.raises(ValueError, match=f"Gate {3 * HIDDEN + 1} .l0. of '0' has only zero weights"):
        normalized(model)
    with torch.no_grad():
        model[0].weight_hh_l0[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight_hh_l0 of '0' has a value that is not finite"):
        normalized(model)


def test_a_recurrence_that_grows_cannot_be_preserved_and_stays_as_it_was():
    layer = build("relu")
    with torch.no_grad():
        layer.weight_hh_l0.copy_(2 * torch.eye(HIDDEN))
        layer.bias_ih_l0.fill_(1.0)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="no stationary state"):
        normalized(layer, inplace=True)
    assert type(layer) is nn.RNN and all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    normalized(layer, "project")


def test_normalizing_twice_is_refused():
    with pytest.raises(ValueError, match="normalized already"):
        normalized(site_of("tanh, plain"))
