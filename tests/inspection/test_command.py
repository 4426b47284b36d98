"""`varprop inspect` from outside: results, exit codes, and one sentence for every mistake."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from varprop.cli.main import main

MODELS = """
import torch
from torch import nn

def good():
    print("noise on standard output")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def bad():
    model = good()
    model[0].bias.data.fill_(-50.0)
    return model

def picture():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

def raises():
    raise RuntimeError("this cannot be built\\nand more")

def no_module():
    return 3

class TwoInputs(nn.Module):
    def forward(self, a, b):
        return a + b
"""


@pytest.fixture
def models(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    return file


@pytest.fixture
def run(capfd):
    """Runs the command in this process: exit status, standard output, standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", *map(str, arguments)])
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_a_good_model(run, models):
    code, out, _ = run(f"{models}:good", "--input-shape", "8")
    assert code == 0 and "Linear" in out and "gradient first to last" in out


def test_a_finding_of_severity_error_is_exit_code_1(run, models):
    code, out, _ = run(f"{models}:bad", "--input-shape", "8")
    assert code == 1 and "error: 1: 100% of its units are dead" in out


def test_json_on_standard_output_is_nothing_else(run, models):
    code, out, err = run(f"{models}:good", "--input-shape", "8", "--json", "-", "--check", "--samples", "32")
    assert code == 0 and json.loads(out)["check"] == "gaussian" and "noise" in err


def test_json_in_a_file_beside_the_table(run, models, tmp_path):
    code, out, _ = run(f"{models}:good", "--input-shape", "8", "--json", tmp_path / "out.json")
    assert code == 0 and "ReLU" in out
    assert json.loads((tmp_path / "out.json").read_text())["model"] == "Sequential"


def test_mean_and_std_describe_the_input(run, models):
    options = ["--input-shape", "3,6,6", "--mean", "0.1,0.2,0.3", "--std", "2", "--json", "-"]
    _, out, _ = run(f"{models}:picture", *options)
    (described,) = json.loads(out)["inputs"]
    assert described["mean"] == pytest.approx(0.2) and described["std"] == pytest.approx(2.0)


def test_a_folder_of_pictures_is_measured(run, models, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for index, colour in enumerate([(0, 51, 102), (255, 51, 204)] * 10):
        image.new("RGB", (9, 7), colour).save(tmp_path / f"{index}.png")
    options = ["--input-shape", "3,6,6", "--json", "-", "--data", tmp_path, "--check", "--samples", "16"]
    _, out, _ = run(f"{models}:picture", *options)
    result = json.loads(out)
    assert result["check"] == "data" and result["inputs"][0]["mean"] == pytest.approx((0.5 + 0.2 + 0.6) / 3, abs=1e-4)


def test_data_brought_to_a_mean_and_std(run, models, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for index in range(4):
        image.new("RGB", (6, 6), (index * 20, index * 40, 255 - index * 60)).save(tmp_path / f"{index}.png")
    options = ["--input-shape", "3,6,6", "--json", "-", "--data", tmp_path, "--mean", "1", "--std", "3"]
    _, out, _ = run(f"{models}:picture", *options)
    (described,) = json.loads(out)["inputs"]
    assert (described["mean"], described["std"]) == pytest.approx((1.0, 3.0), rel=1e-4)


def test_weights_are_loaded(run, models, tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[0].weight, 0.5)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "weights.pt")
    _, out, _ = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / "weights.pt", "--json", "-")
    row = next(row for row in json.loads(out)["rows"] if row["label"] == "0")
    assert row["numbers"]["std"] == pytest.approx((8 * 0.25) ** 0.5)


def test_a_class_in_a_package(run):
    code, out, _ = run("torch.nn:ReLU", "--input-shape", "4", "--json", "-")
    assert code == 0 and json.loads(out)["model"] == "ReLU"


MISTAKES = {
    "no colon": (["models"], "TARGET is"),
    "no file": (["nowhere.py:f"], "There is no file nowhere.py"),
    "no module": (["no_such_package:f"], "There is no module no_such_package"),
    "no function": (["{models}:nothing"], "has no function or class 'nothing'"),
    "factory raises": (["{models}:raises"], "failed with RuntimeError: this cannot be built"),
    "no model": (["{models}:no_module"], "must return an nn.Module, not int"),
    "unknown shape": (["{models}:good"], "give it by --input-shape"),
    "shape of letters": (["{models}:good", "--input-shape", "a,b"], "whole numbers"),
    "empty shape": (["{models}:good", "--input-shape", "0"], "1 and more"),
    "wrong shape": (["{models}:good", "--input-shape", "7"], "does not take inputs of shape (7,)"),
    "several inputs": (["{models}:TwoInputs", "--input-shape", "4"], "takes 2 inputs (a, b)"),
    "no weights": (["{models}:good", "--input-shape", "8", "--weights", "none.pt"], "There is no file none.pt"),
    "weights of text": (["{models}:good", "--input-shape", "8", "--weights", "{models}"], "cannot be read as weights"),
    "means of letters": (["{models}:good", "--input-shape", "8", "--mean", "x"], "--mean takes numbers"),
    "too many means": (["{models}:good", "--input-shape", "8", "--mean", "1,2"], "one number or 8"),
    "negative std": (["{models}:good", "--input-shape", "8", "--std=-1"], "finite positive"),
    "no data": (["{models}:good", "--input-shape", "8", "--data", "nothing"], "there is no 'nothing'"),
    "empty folder": (["{models}:picture", "--input-shape", "3,6,6", "--data", "{empty}"], "holds 0 pictures"),
    "no timm": (["timm:resnet50"], "pip install timm"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_every_mistake_gets_one_sentence(run, models, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setitem(sys.modules, "timm", None)
    (tmp_path / "empty").mkdir()
    places = {"models": models, "empty": tmp_path / "empty"}
    code, out, err = run(*(argument.format(**places) for argument in arguments))
    assert code == 1 and words in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert out in ("", "noise on standard output\n")


def test_debug_shows_the_traceback(run, models):
    code, _, err = run(f"{models}:raises", "--input-shape", "8", "--debug")
    assert code == 1 and "Traceback" in err


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.Linear(8, 16)], "lacks 2 tensor(s), such as 2.weight"),
        (
            [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 4)],
            "no place for 2 tensor(s), such as 3.weight",
        ),
        ([nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)], "another shape for 2 tensor(s), such as 2.weight"),
    ],
)
def test_weights_that_do_not_fit(run, models, tmp_path, layers, words):
    torch.save(nn.Sequential(*layers).state_dict(), tmp_path / "weights.pt")
    code, _, err = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / "weights.pt")
    assert code == 1 and words in err


def test_weights_that_run_code_are_refused(run, models, tmp_path):
    torch.save(nn.Linear(8, 16), tmp_path / "module.pt")
    code, _, err = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / "module.pt")
    assert code == 1 and "cannot be read as weights" in err


class Words(nn.Module):
    """Stands in for a language model of transformers."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(13, 6), nn.Linear(6, 3)

    def forward(self, input_ids, mask=None):
        return (self.head(self.table(input_ids)),)


def test_a_transformers_configuration(run, monkeypatch):
    config = SimpleNamespace(vocab_size=13)
    package = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=lambda name: config),
        AutoModel=SimpleNamespace(from_config=lambda given: Words() if given is config else None),
    )
    monkeypatch.setitem(sys.modules, "transformers", package)
    code, out, _ = run("hf:words", "--input-shape", "7", "--json", "-")
    assert code == 0 and json.loads(out)["inputs"][0]["extents"] == [1, 7]
    code, _, err = run("hf:words", "--data", "digits")
    assert code == 1 and "takes tokens" in err


def test_a_timm_model_brings_its_shape(run, monkeypatch):
    def create_model(name, pretrained):
        model = nn.Sequential(nn.Conv2d(3, 2, 3))
        model.default_cfg = {"input_size": (3, 9, 9)}
        return model

    package = SimpleNamespace(is_model=lambda name: name == "small", create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", package)
    code, out, _ = run("timm:small", "--json", "-")
    assert code == 0 and json.loads(out)["inputs"][0]["extents"] == [1, 3, 9, 9]
    assert "timm has no model 'large'" in run("timm:large")[2]
