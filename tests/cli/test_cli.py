import gzip
import hashlib
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch

import varprop as vp
from tests.lab.data.loopback import Site, serving
from varprop.cli.main import main
from varprop_lab import commands, datasets
from varprop_lab.batches import Augmentation
from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.protocol import Cell, Outcome, Search, Start

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture
def varprop_command(capsys, monkeypatch):
    """Runs the command line in this process: exit status, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["varprop", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def outcome(method="analytic", start="ap2", seed=0, accuracy=0.5, **changes):
    cell = Cell("digits", method, start, seed)
    curves = {"train_loss": [2.0, 0.25 + 0.1 * seed], "valid_accuracy": [0.4, 0.9]}
    search = Search(1e-2, 0.3, [(1e-2, 0.3)], at_bound=True)
    return replace(Outcome(cell, search, curves, 0.1, accuracy, False, 0.0, 1.0), **changes)


class StandInComparison:
    """What `compare` returns."""

    def __init__(self, page):
        self.report = lambda: page

    def __str__(self):
        return "AP2 wins."


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """Stands in for the parts that train and report; keeps what they were called with."""
    calls = {}

    def stand_in(name, result):
        def called(*args, **kwargs):
            calls[name] = (args, kwargs)
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(f"varprop_lab.{name}", called)

    def install(error=None):
        page = tmp_path / "report.html"
        stand_in("paper.experiments.reproduce", error or {"digits": [outcome()]})
        stand_in("comparison.compare", error or StandInComparison(page))
        stand_in("paper.report.write", page)
        monkeypatch.setattr("varprop_lab.report.write_one", lambda *_: page)
        return calls

    return install


def test_version_and_help(varprop_command):
    code, out, _ = varprop_command("--version")
    assert code == 0 and out == f"varprop {vp.__version__}\n"
    code, out, _ = varprop_command("--help")
    assert code == 0 and all(name in out for name in ("demo", "reproduce", "compare", "doctor", "data", "--debug"))
    assert varprop_command()[0] == 2


def test_the_installed_command_is_this_one():
    module, function = PROJECT["scripts"]["varprop"].split(":")
    assert getattr(import_module(module), function) is main


def test_doctor(varprop_command, monkeypatch, tmp_path):
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path / "data"))
    code, out, _ = varprop_command("doctor")
    assert code == 0 and f"torch {torch.__version__}" in out and str(tmp_path / "data") in out
    assert "mnist: missing: varprop data get mnist" in out
    pretend_installed(monkeypatch, lambda package: package != "scipy")
    assert "lab: scipy missing: pip install '.[lab]'" in varprop_command("doctor")[1]


def pretend_installed(monkeypatch, there):
    def version(package):
        if not there(package):
            raise metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)


DOCTORED = """
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))

def nothing():
    return nn.ReLU()
"""


def test_doctor_says_which_layers_are_folded_together_which_by_operation_and_why(varprop_command, tmp_path):
    (tmp_path / "net.py").write_text(DOCTORED)
    code, out, err = varprop_command("doctor", f"{tmp_path / 'net.py'}:plain", "--input-shape", "6")
    lines = [line[10:] for line in out[out.index("layers ") :].splitlines()]
    assert code == 0 and lines[:2] == ["0  together", "2  together"], err
    assert lines[2].startswith("4  by operation  after ") and lines[3] == "2 together, 1 by operation, 0 alone"
    code, _, err = varprop_command("doctor", f"{tmp_path / 'net.py'}:nothing", "--input-shape", "6")
    assert code and "cannot be normalized: The model has no linear layer" in err and err.count("\n") == 1


def test_doctor_knows_the_extras(varprop_command, monkeypatch):
    pretend_installed(monkeypatch, lambda package: False)
    told = dict(re.findall(r"(\w+): (.+) missing: pip install", varprop_command("doctor")[1]))
    extras = PROJECT["optional-dependencies"]
    assert told.keys() == {"lab", "report", "tracking"}
    assert {name: packages.split(", ") for name, packages in told.items()} == {name: extras[name] for name in told}


# --- reproduce, demo, compare ---


def test_reproduce_hands_everything_on(varprop_command, lab, tmp_path):
    calls = lab()
    options = shlex.split(
        "--device cpu --seeds 3 --epochs 2 --lr-max 0.1 --lr-max 0.01 --root data --resume --tensorboard "
        "--max-seconds 60 --jobs 2 --ray auto --compile --methods analytic,batch --starts bn --search brent "
        "--own-weights converted --borders plain --out"
    )
    code, out, err = varprop_command("reproduce", "mnist", "naive", *options, tmp_path)
    assert (code, err) == (0, "")
    args, given = calls["paper.experiments.reproduce"]
    assert args[:2] == (["mnist", "naive"], tmp_path)
    assert given == {
        "device": "cpu",
        "root": Path("data"),
        "resume": True,
        "overwrite": False,
        "tensorboard": tmp_path / "tensorboard",
        "max_seconds": 60.0,
        "jobs": 2,
        "ray": "auto",
    }
    assert args[2] == {
        "seeds": 3,
        "epochs": 2,
        "lr_max": (0.1, 0.01),
        "methods": ("analytic", "batch"),
        "starts": ("bn",),
        "compiled": True,
        "search": "brent",
        "own_weights": "converted",
        "borders": "plain",
    }
    assert calls["paper.report.write"][0] == (tmp_path, ["mnist", "naive"])
    assert "AP2" in out and out.endswith(f"Report: {tmp_path / 'report.html'}\n")


def test_reproduce_leaves_the_protocol_alone_by_default(varprop_command, lab):
    calls = lab()
    assert varprop_command("reproduce", "mnist")[0] == 0
    (_, _, settings), given = calls["paper.experiments.reproduce"]
    assert (
        len(settings) == 9
        and set(settings.values()) == {None}
        and given["root"] is given["ray"] is given["tensorboard"] is None
    )
    assert given["resume"] is False and given["max_seconds"] == math.inf and given["device"] == "auto"


def test_all_is_written_out_and_what_needs_no_training_is_left_to_the_report(varprop_command, lab, tmp_path):
    calls = lab()
    (tmp_path / "claims.json").write_text('{"claims": [{"verdict": "holds", "claim": "Water is wet"}]}')
    code, out, _ = varprop_command("reproduce", "mnist", "all", "--out", tmp_path)
    trained, reported = calls["paper.experiments.reproduce"][0][0], calls["paper.report.write"][0][1]
    assert code == 0 and trained[0] == "mnist"
    assert set(trained) == EXPERIMENTS.keys() - {"digits"} and len(trained) == len(set(trained))
    assert set(reported) == {*trained, "relu", "claims"}
    assert "holds           Water is wet" in out


def test_reproduce_names_what_it_knows(varprop_command, lab):
    calls = lab()
    code, _, err = varprop_command("reproduce", "mnist", "imagenet")
    assert code == 2 and "no experiment 'imagenet'" in err and "noisy-cifar10" in err and "claims" in err and not calls


def test_studies_that_only_make_records_are_run_in_a_checkout(varprop_command, lab):
    calls = lab()
    for name, module in commands.MOVED.items():
        code, _, err = varprop_command("reproduce", "mnist", name)
        assert code == 2 and f"`{name}`" in err and f"python -m {module} --help" in err and not calls
        assert find_spec(module)


def test_compare_hands_everything_on(varprop_command, lab, tmp_path):
    calls = lab()
    given = shlex.split(
        "--dataset digits --model net.py:make --methods analytic,batch,layer --starts none,orthogonal --shift 1 --flip "
        "--loss net.py:loss --optimizer SGD "
        "--noise 0.1 --batch-size 32 --jobs 2 --epochs 3 --device cpu --out"
    )
    assert varprop_command("compare", *given, tmp_path)[0] == 0
    args, handed = calls["comparison.compare"]
    assert args == ("net.py:make", "digits") and handed["out"] == tmp_path
    assert (handed["methods"], handed["starts"]) == (("analytic", "batch", "layer"), ("none", "orthogonal"))
    assert (handed["loss"], handed["optimizer"]) == ("net.py:loss", "SGD")
    assert handed["augmentation"] == Augmentation(1, True, 0.1)
    assert handed["batch_size"] == 32 and handed["jobs"] == 2 and handed["epochs"] == 3
    assert "seeds" not in handed and "lr_max" not in handed


@pytest.mark.parametrize(("option", "value"), [("--methods", "instance"), ("--methods", ","), ("--starts", "ap2,x")])
def test_compare_names_what_it_knows(varprop_command, lab, option, value):
    calls = lab()
    code, _, err = varprop_command("compare", "--dataset", "digits", "--model", "net.py:make", option, value)
    assert code == 2 and option in err and repr(value) in err and not calls


def test_demo_overwrites_no_earlier_one(varprop_command, monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr("varprop_lab.demo.run", folders.append)
    for expected in ("demo", "demo-2", "demo-3"):
        code, out, _ = varprop_command("demo", "--out", tmp_path / "demo")
        assert code == 0 and str(tmp_path / expected / "demo.png") in out
        (tmp_path / expected).mkdir()
    assert folders == [tmp_path / name for name in ("demo", "demo-2", "demo-3")]


def test_the_starts_of_a_comparison_are_those_of_the_lab(varprop_command, lab):
    assert (*commands.COMPARED_STARTS, "wn") == get_args(Start)
    calls = lab()
    assert varprop_command("compare", "--dataset", "digits", "--model", "net.py:make", "--starts", "bn")[0] == 0
    assert calls["comparison.compare"][1]["starts"] == ("bn",)


# --- with the real lab ---

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10), nn.LogSoftmax(1))
"""


@pytest.mark.slow
def test_compare_for_real_and_resume(varprop_command, tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    asked = ["compare", "--dataset", "digits", "--model", f"{tmp_path / 'net.py'}:make", "--methods", "analytic,batch"]
    asked += ["--starts", "ap2", "--epochs", "1", "--device", "cpu", "--out", tmp_path / "out"]
    code, out, err = varprop_command(*asked)
    assert code == 0, err
    assert (
        out.startswith("Which method has the lowest training loss is undecided") and "one seed decides nothing" in out
    )
    assert [line.split()[4] for line in out.splitlines()[3:5]] == ["BN", "AP2"]
    assert (tmp_path / "out" / "compare" / "report.html").stat().st_size > 1000
    code, _, err = varprop_command(*asked)
    assert code == 2 and "--resume" in err and err.count("\n") == 1
    assert varprop_command(*asked, "--resume")[1] == out


def test_a_missing_data_set_names_the_command(varprop_command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("VARPROP_DATA", raising=False)
    code, _, err = varprop_command("reproduce", "mnist", "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2 and "`varprop data get mnist`" in err and err.count("\n") == 1


# --- errors ---


def test_an_error_is_one_sentence(varprop_command, lab):
    lab(vp.VarpropError("The disk is full of sand; empty it."))
    assert varprop_command("reproduce", "mnist") == (2, "", "varprop: The disk is full of sand; empty it.\n")


@pytest.mark.parametrize("arguments", [("--debug", "reproduce", "mnist"), ("reproduce", "mnist", "--debug")])
def test_debug_anywhere_shows_the_traceback(varprop_command, lab, arguments):
    lab(vp.VarpropError("sand"))
    code, _, err = varprop_command(*arguments)
    assert code == 2 and "Traceback" in err and "VarpropError: sand" in err


def test_an_unexpected_error_is_one_sentence_too(varprop_command, lab):
    lab(KeyError("lost"))
    code, _, err = varprop_command("reproduce", "mnist")
    assert code == 2 and err.count("\n") == 1 and "KeyError: 'lost'" in err and "--debug" in err


def test_an_error_of_the_system_names_the_file(varprop_command, lab):
    lab(PermissionError(13, "Permission denied", "/locked"))
    assert varprop_command("reproduce", "mnist")[2] == "varprop: /locked: Permission denied.\n"


def test_a_missing_package_names_the_extra(varprop_command, lab):
    lab(ModuleNotFoundError("No module named 'scipy'", name="scipy"))
    assert (
        varprop_command("reproduce", "mnist")[2]
        == "varprop: scipy is missing: pip install '.[lab]' in a checkout of varprop.\n"
    )


def test_control_c_says_how_to_go_on(varprop_command, lab):
    lab(KeyboardInterrupt())
    code, _, err = varprop_command("reproduce", "mnist")
    assert code == 130 and "--resume" in err and "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_sentence(varprop_command, tmp_path):
    code, _, err = varprop_command("reproduce", "mnist", "--device", "cuda", "--out", tmp_path)
    assert code == 2 and "sees no CUDA device; use --device cpu" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("reproduce",),
        ("reproduce", "mnist", "--seeds", "0"),
        ("reproduce", "mnist", "--epochs", "x"),
        ("reproduce", "mnist", "--lr-max", "0"),
        ("reproduce", "mnist", "--device", "tpu"),
        ("compare", "--dataset", "digits"),
        ("frobnicate",),
    ],
)
def test_wrong_use_exits_with_two(varprop_command, lab, arguments):
    calls = lab()
    code, _, err = varprop_command(*arguments)
    assert code == 2 and "--help` lists" in err and err.count("\n") == 1 and not calls


BARE = """
import sys
for name in ("typer", "rich", "scipy", "sklearn", "matplotlib", "jinja2", "pandas"):
    sys.modules[name] = None
from varprop.cli.main import main

def run(*arguments):
    print("$>", *arguments)
    try:
        main(arguments)
    except SystemExit as ended:
        print("status", ended.code or 0)
    sys.stderr.flush()

run("--version")
run("doctor")
run("inspect", "torch.nn:ReLU", "--input-shape", "4", "--std", "2")
run("inspect", "torch.nn:ReLu", "--input-shape", "4")
run("inspect", "torch.nn:ReLU", "--samples", "3")
run("demo", "--out", "nowhere")
run()
"""


@pytest.mark.slow
def test_with_torch_alone_the_command_line_works_in_plain_text():
    run = subprocess.run([sys.executable, "-c", BARE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answers = [part.split("\n", 1)[1] for part in run.stdout.split("$>")[1:]]
    version, doctor, relu, misspelt, few, demo, nothing = answers
    assert version.startswith("varprop ") and version.endswith("status 0\n")
    assert "torch " in doctor and doctor.endswith("status 0\n")
    assert "ReLU" in relu and "1.17" in relu and relu.endswith("status 0\n")  # sqrt(1/2 - 1/(2 pi)) times 2
    assert "has no function or class 'ReLu'. Did you mean ReLU" in misspelt and misspelt.endswith("status 2\n")
    assert "--samples: 3 must be at least 16" in few and few.endswith("status 2\n")
    assert "pip install '.[lab]'" in demo and demo.endswith("status 2\n")
    assert "usage: varprop" in nothing and "inspect" in nothing and nothing.endswith("status 2\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ins"], ["inspect"]),
        (["inspect", "--quan"], ["--quantization"]),
        (["inspect", "torch.nn:ReLU", "--pos"], ["--positions"]),
        (["data", ""], ["-h", "--help", "get"]),
        (["reproduce", "naive", "noisy"], ["noisy-mnist", "noisy-cifar10"]),
        (["compare", "--in"], []),  # the old name of an option
    ],
)
def test_the_shell_completes_commands_options_and_names(varprop_command, monkeypatch, words, expected):
    monkeypatch.setenv("_VARPROP_COMPLETE", "1")
    assert varprop_command(*words)[1].split() == expected


def test_the_shell_is_told_how_to_complete_and_python_runs_the_package(varprop_command, tmp_path):
    (tmp_path / "varprop").write_text(f'#!/bin/sh\nexec {sys.executable} -m varprop "$@"\n')
    (tmp_path / "varprop").chmod(0o755)
    ask = "COMP_WORDS=(varprop doc); COMP_CWORD=1; _varprop; echo ${COMPREPLY[@]}"
    script = f"{varprop_command('--show-completion')[1]}\nPATH={tmp_path}:$PATH\n{ask}"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "doctor\n"


WITHOUT_LAB = """
import contextlib, io, json, sys
sys.modules["varprop_lab"] = None  # as if it were not installed
from varprop.cli.main import main

results = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(command.split())
        except SystemExit as end:
            code = end.code
    results.append([code or 0, out.getvalue(), err.getvalue()])
assert not [name for name in sys.modules if name.startswith("varprop_lab.")]
print(json.dumps(results))
"""


@pytest.mark.slow
def test_without_the_lab_its_commands_say_what_to_install_and_models_are_inspected():
    lab = ["demo --out x", "reproduce mnist", "compare -h", "bench", "data get mnist"]
    inspect = "inspect torch.nn:ReLU --input-shape 4"
    command = [sys.executable, "-c", WITHOUT_LAB, *lab, inspect, f"{inspect} --data mnist"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    *refused, inspected, with_data = json.loads(run.stdout)
    names = [words.split()[0] for words in lab]
    sentence = "varprop: {} needs the lab: pip install '.[lab]' in a checkout of varprop.\n"
    assert refused == [[2, "", sentence.format(name)] for name in names]
    assert inspected[0] == 0 and "ReLU" in inspected[1]
    assert with_data[0] == 2 and "or, with the lab, mnist, cifar10 or digits" in with_data[2]


# --- data get ---


@pytest.fixture
def small_mnist(monkeypatch):
    """A server with one small file of MNIST; also the place where `varprop data get` looks."""
    content = b"\0\0\x08\x01\0\0\0\x01\x07"
    with serving(Site({"/labels.gz": gzip.compress(content)})) as site:
        archive = replace(
            datasets.ARCHIVES["mnist"][1],
            urls=(f"{site.url}/labels.gz",),
            contents={"train-labels-idx1-ubyte": hashlib.sha256(content).hexdigest()},
        )
        monkeypatch.setattr(datasets, "ARCHIVES", {"mnist": (archive,)})
        yield content


def test_data_get_with_root_and_variable(varprop_command, small_mnist, tmp_path, monkeypatch):
    code, out, _ = varprop_command("data", "get", "mnist", "--root", tmp_path / "given")
    assert code == 0 and f"mnist is in {tmp_path / 'given'}" in out
    assert (tmp_path / "given/MNIST/raw/train-labels-idx1-ubyte").read_bytes() == small_mnist
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path / "variable"))
    assert varprop_command("data", "get", "mnist", "mnist")[0] == 0
    assert (tmp_path / "variable/MNIST/raw/train-labels-idx1-ubyte").exists()
    assert "already in" in varprop_command("data", "get", "mnist")[1]


def test_data_get_unknown_name(varprop_command):
    code, _, err = varprop_command("data", "get", "svhn")
    assert code == 2 and err == "varprop: There is no data set 'svhn'; known are mnist, cifar10.\n"
