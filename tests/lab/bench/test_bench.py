import functools
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp
from varprop.cli.main import main as command_line
from varprop_lab.bench import cases, run
from varprop_lab.bench.cases import Recipe
from varprop_lab.bench.run import Measurement, Options, Record, Session, tables, write_page
from varprop_lab.environment import chosen_device
from varprop_lab.paper.verdicts.judge import CLAIMS, judge_claim
from varprop_lab.protocol import FACTORIES

CPU = torch.device("cpu")
TINY = cases.cases(CPU, tiny=True)
LINEAR = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


@pytest.fixture(scope="module")
def trained():
    """A tiny network by its normalization, made when it is asked for, and its batch."""
    case = TINY["mlp"]
    return functools.cache(lambda name: run.network(case, name, *case.data(CPU)))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A complete run at tiny sizes: its record, its folder, and its lines of progress."""
    out, lines = tmp_path_factory.mktemp("bench"), []
    options = Options(
        device="cpu",
        cases=("mlp",),
        modes=("eager", "compiled", "captured"),
        variants=("none", "batch", "analytic"),
        rounds=3,
        seconds=0.01,
        out=out,
        tiny=True,
    )
    return run.run(options, lines.append), out, lines


# --- the networks ---


def test_networks_have_the_sizes_they_are_known_by():
    full = cases.cases(torch.device("cuda"))
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in case.build(Recipe()).parameters()) for name, case in full.items()}
        resnet = full["resnet50"].build(cases.VARIANTS["batch"][1])
    paper = FACTORIES["cifar10"]()
    assert counts["cifar"] == sum(p.numel() for p in paper.parameters())
    assert counts["mlp"] == sum(p.numel() for p in FACTORIES["mnist"]().parameters())
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032  # torchvision's resnet50
    assert sum(isinstance(m, nn.Conv2d) for m in resnet.modules()) == 53


@pytest.mark.parametrize("name", cases.CASES)
def test_every_norm_follows_every_layer_but_the_last(name):
    case = TINY[name]
    for variant, kind in (("batch", nn.modules.batchnorm._BatchNorm), ("group", nn.GroupNorm), ("layer", nn.GroupNorm)):
        modules = list(case.network(variant, CPU).modules())
        layers, norms = ([m for m in modules if isinstance(m, kinds)] for kinds in (LINEAR, kind))
        assert len(norms) == len(layers) - 1
        assert [layer.bias is not None for layer in layers].count(True) == 1
        if variant == "layer":
            assert {norm.num_groups for norm in norms} == {1}


@pytest.mark.parametrize("name", cases.CASES)
def test_plain_network_gives_scores_and_has_biases(name):
    case = TINY[name]
    model, (images, labels) = case.network("none", CPU), case.data(CPU)
    assert math.isfinite(float(F.cross_entropy(model(images), labels).detach()))
    assert all(layer.bias is not None for layer in model.modules() if isinstance(layer, LINEAR))


@pytest.mark.slow
def test_variants_are_what_they_are_called(trained):
    weighted = [m for m in trained("weight").model.modules() if hasattr(m, "parametrizations")]
    assert len(weighted) == 7
    assert torch.allclose(*(trained(v).model(trained(v).images) for v in ("none", "weight")))
    assert "normalized" in repr(trained("analytic").model)
    plain = vp.fold(trained("analytic").model)
    images = trained("analytic").images
    assert torch.allclose(plain(images), trained("analytic").model(images), atol=1e-5)


# --- the step ---


@pytest.mark.slow
@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_step_reaches_every_parameter(trained, variant):
    network = trained(variant)
    run_step, memory = run.make_step(network, "eager", "aot_eager")
    assert math.isfinite(float(run_step())) and memory == 0
    assert all(p.grad is not None for p in network.model.parameters())
    run.drop_traces(network)
    assert all(p.grad is None for p in network.model.parameters()) and network.model.training


@pytest.mark.slow
def test_optimizers_are_those_of_the_cases(trained):
    adam = run.optimizer(trained("none"), capturable=True)
    assert isinstance(adam, torch.optim.Adam) and adam.defaults["capturable"] and adam.defaults["foreach"]
    case = TINY["cifar"]
    sgd = run.optimizer(run.network(case, "none", *case.data(CPU)), capturable=False)
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.9 and sgd.defaults["foreach"]


def test_each_variant_is_compiled_from_code_of_its_own(trained):
    codes = [trained(v).loss("eager").__code__ for v in ("none", "batch")]
    assert codes[0] != codes[1]


def test_kernels_are_told_from_everything_else():
    kinds = ("kernel", "cuda_runtime", "gpu_memcpy", "kernel", "gpu_user_annotation", None)
    assert run.count_kernels({"traceEvents": [{"cat": kind} if kind else {} for kind in kinds]}) == 2
    assert run.kernels(lambda: None, CPU) is None


# --- timing ---


def test_functions_take_turns_and_times_are_per_call(monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    pauses = {"short": 0.002, "long": 0.006}

    def called(name):
        calls.append(name)
        clock[0] += pauses[name]

    times = run.interleaved({name: lambda name=name: called(name) for name in pauses}, 3, 0.036, CPU)
    assert times == {name: [pytest.approx(pause)] * 3 for name, pause in pauses.items()}
    turns = [n for n, before in zip(calls, [None, *calls[:-1]], strict=True) if n != before]
    warm_up, rounds = ["short", "long"], ["short", "long", "short", "long"]  # short-long, long-short, short-long
    assert turns == warm_up + rounds
    assert (calls.count("short"), calls.count("long")) == (3 + 3 * 6, 3 + 3 * 2)  # three to find out how many


def test_quartiles_and_ratios():
    assert run.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert run.quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert run.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


# --- the plan ---


def test_default_plan():
    gpu, full = torch.device("cuda"), cases.cases(torch.device("cuda"))
    assert cases.default_cases(gpu) == cases.CASES and cases.default_modes(gpu) == cases.MODES
    assert cases.default_modes(CPU) == ("eager",)
    assert cases.variants_of(full["resnet50"], "compiled", None) == ("none", "batch", "analytic")
    assert cases.variants_of(full["resnet50"], "eager", None) == tuple(cases.VARIANTS)
    assert cases.variants_of(full["cifar"], "captured", None) == tuple(cases.VARIANTS)
    assert cases.variants_of(full["cifar"], "captured", ("none",)) == ("none",)
    assert [full["cifar"].precision(mode) for mode in cases.MODES] == ["tf32", "bf16", "bf16"]
    assert cases.cases(CPU)["cifar"].batch == 32 and cases.cases(CPU)["cifar"].precision("compiled") == "float32"


# --- a whole run ---


@pytest.mark.slow
def test_run_measures_every_cell(measured):
    record, _, lines = measured
    assert {(c.mode, c.variant) for c in record.cells if len(c.rounds) == 3} == {
        (mode, variant) for mode in ("eager", "compiled") for variant in ("none", "batch", "analytic")
    }
    assert any("captured: skipped" in note for note in record.notes)
    assert record.time_ratio(record.cell("mlp", "eager", "none")) == 1.0
    assert any("mlp compiled analytic norm:" in line for line in lines)
    assert torch.backends.mkldnn.enabled  # switched off by torch if it meets bfloat16 on a CPU that has none
    (inference,) = record.inferences
    assert inference.identical and inference.ratio > 0


@pytest.mark.slow
def test_file_says_how_it_was_made_and_serves_the_claim_on_overhead(measured):
    record, out, _ = measured
    kept = json.loads((out / "normalization.json").read_text("utf-8"))
    assert {"command", "hardware", "versions", "git", "step", "settings"} <= kept.keys() and kept["finished"]
    claim = next(claim for claim in CLAIMS if claim.name == "overhead-bn")
    finding = judge_claim(claim, [], [out / "normalization.json"])  # of an MLP, which is no convolutional network
    assert finding.verdict == "no data" and len(finding.measured) == 3
    assert f"AP2 {1e3 * record.cells[2].seconds:.3g} ms" in finding.measured[1]


@pytest.mark.slow
def test_tables(measured):
    record, _, _ = measured
    text = "\n".join(found.plain() for found in tables(record))
    assert "analytic norm" in text and "quartiles" in text and "arget" not in text


@pytest.mark.slow
def test_the_page_has_all_tables(measured):
    record, out, _ = measured
    text = write_page(record, out).read_text("utf-8")
    assert f"- Command: `{record.manifest['command']}`" in text
    assert all(f"## {found.heading}" in text for found in tables(record) if found.rows)
    assert "| variant | step ms |" in text and "| analytic norm |" in text


@pytest.mark.slow
def test_one_failure_leaves_the_others(monkeypatch, tmp_path):
    real = run.make_step

    def make_step(network, mode, backend):
        if network.variant == "batch":
            raise RuntimeError("no memory\nand a long story")
        return real(network, mode, backend)

    monkeypatch.setattr(run, "make_step", make_step)
    options = Options("cpu", ("mlp",), ("eager",), ("batch", "none", "weight"), 1, 0.01, out=tmp_path, tiny=True)
    record = run.run(options, lambda text: None)
    failed = next(cell for cell in record.cells if cell.variant == "batch")
    assert not failed.rounds and failed.note == "RuntimeError: no memory"
    assert record.time_ratio(record.cell("mlp", "eager", "weight")) is not None
    assert "no memory" in tables(record)[0].plain()
    under_way = Session(options, CPU, lambda text: None)
    run.attempt(under_way, "inference", lambda: 1 / 0)
    assert under_way.record.notes[-1] == "inference: failed, ZeroDivisionError: division by zero"


def test_nothing_is_begun_after_the_time_is_over(tmp_path):
    options = Options("cpu", ("mlp",), rounds=1, max_seconds=1e-9, out=tmp_path, tiny=True)
    record = run.run(options, lambda text: None)
    assert not any(cell.rounds for cell in record.cells) and any("skipped" in note for note in record.notes)
    kept = json.loads((tmp_path / "normalization.json").read_text("utf-8"))
    assert not any(cell["rounds"] for cell in kept["cells"]) and "targets" not in kept


@pytest.mark.parametrize(("load", "told"), [(0.1, False), (2.5, True)])
def test_other_work_is_told_of(load, told, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "load", lambda: load)
    record = Session(Options(out=tmp_path), CPU, lambda text: None).record
    assert record.manifest["hardware"]["load"] == load
    assert any("load 2.5" in note for note in record.notes) is told


# --- tables ---


def test_ratios_are_to_the_network_without_normalization():
    sizes = {"none": 100, "batch": None, "analytic": 104}
    cells = [Measurement("mlp", "MLP", "eager", v, "float32", 8, memory=m, rounds=(1.0,)) for v, m in sizes.items()]
    record = Record({"hardware": {}}, cells)
    assert [record.memory_ratio(cell) for cell in cells] == [1.0, None, 1.04]
    assert [record.time_ratio(cell) for cell in cells] == [1.0, 1.0, 1.0]
    assert Record({"hardware": {}}, cells[1:]).time_ratio(cells[2]) is None


# --- the command line ---


@pytest.mark.parametrize(
    ("option", "known"), [("--cases", "resnet50"), ("--modes", "captured"), ("--variants", "group")]
)
def test_unknown_names_get_one_sentence(option, known, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        command_line(["bench", option, "wrong", "--device", "cpu", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"varprop: {option} takes") and "'wrong'" in said and known in said
    assert not list(tmp_path.iterdir())


def test_missing_gpu_gets_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(vp.VarpropError, match="sees no CUDA device"):
        chosen_device("cuda")


@pytest.mark.slow
def test_varprop_bench(capsys, tmp_path):
    given = [
        "bench",
        "--device",
        "cpu",
        "--cases",
        "mlp",
        "--variants",
        "none",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--tiny",
        "--out",
    ]
    with pytest.raises(SystemExit) as ended:
        command_line([*given, str(tmp_path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.startswith("A step:") and "mlp eager none:" in out
    assert f"Results: {tmp_path / 'normalization.json'}, {tmp_path / 'normalization.md'}" in out


@pytest.mark.slow
def test_it_needs_nothing_but_torch(tmp_path):
    extras = "('jinja2', 'matplotlib', 'rich', 'scipy', 'sklearn', 'typer', 'torchvision')"
    script = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {extras} else found(name, *more)
from varprop.cli.main import main
main("bench --device cpu --cases mlp --variants none --rounds 1 --seconds 0.01 --tiny --out {tmp_path}".split())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "normalization.json").is_file()
