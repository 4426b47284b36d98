"""`varprop inspect` from outside: results, exit codes, and one sentence for every mistake."""

import io
import json
import struct
import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.nn as nn

from varprop.cli import inspect as command
from varprop.cli.main import main

MODELS = """
from collections import OrderedDict

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

def padded():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

def raises():
    raise RuntimeError("this cannot be built\\nand more")

def raises_without_words():
    raise KeyError

def no_module():
    return 3

def called_module():
    return nn.Sequential(OrderedDict(module=nn.Linear(8, 4)))

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


def test_positions_are_kept_apart(run, models, tmp_path):
    """A border of zeros halves the variance in the corners; a picture's mean is another at every pixel."""
    options = ["--input-shape", "3,6,6", "--json", "-", "--positions"]
    row = next(r for r in json.loads(run(f"{models}:padded", *options, "--std", "2")[1])["rows"] if r["label"] == "0")
    assert row["uniform"] == [False] * 4 and row["extents"] == [1, 4, 6, 6]
    assert row["std"]["most"] > 1.3 * row["std"]["least"]
    torch.save(torch.randn(50, 3, 6, 6) + 10 * torch.rand(3, 6, 6), tmp_path / "data.pt")
    together, apart = (
        json.loads(run(f"{models}:padded", *options[: 4 + more], "--data", tmp_path / "data.pt")[1])["inputs"][0]["std"]
        for more in (0, 1)
    )
    assert together > 2 and apart == pytest.approx(1.0, abs=0.05)


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


@pytest.mark.parametrize("name", ("weights.pt", "weights.safetensors"))
def test_weights_are_loaded(run, models, tmp_path, name):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[0].weight, 0.5)
    if name.endswith("safetensors"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / name)
    else:
        torch.save({"state_dict": model.state_dict()}, tmp_path / name)
    _, out, _ = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / name, "--json", "-")
    row = next(row for row in json.loads(out)["rows"] if row["label"] == "0")
    assert row["numbers"]["std"] == pytest.approx((8 * 0.25) ** 0.5)


def compiled_inside(model):
    model[0] = torch.compile(model[0])
    return model


WRAPPERS = {
    "compiled": torch.compile,
    "DataParallel": nn.DataParallel,
    "compiled, then DataParallel": lambda model: nn.DataParallel(torch.compile(model)),
    "DataParallel, then compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "averaged": torch.optim.swa_utils.AveragedModel,
    "a layer compiled": compiled_inside,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_of_a_wrapped_model_are_loaded(run, models, tmp_path, wrapper):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[0].weight, 0.5)
    torch.save(WRAPPERS[wrapper](model).state_dict(), tmp_path / "weights.pt")
    _, out, _ = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / "weights.pt", "--json", "-")
    row = next(row for row in json.loads(out)["rows"] if row["label"] == "0")
    assert row["numbers"]["std"] == pytest.approx((8 * 0.25) ** 0.5)


def test_a_module_that_is_called_module_keeps_its_name(run, models, tmp_path):
    model = nn.Sequential(OrderedDict(module=nn.Linear(8, 4)))
    torch.save({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}, tmp_path / "w.pt")
    _, out, _ = run(f"{models}:called_module", "--input-shape", "8", "--weights", tmp_path / "w.pt", "--json", "-")
    row = next(row for row in json.loads(out)["rows"] if row["label"] == "module")
    assert row["numbers"]["std"] == pytest.approx((8 * 0.25) ** 0.5)


def test_saved_tensors_are_data(run, models, tmp_path):
    torch.manual_seed(0)
    values = torch.randn(40, 8) * 3 + 1
    torch.save(values, tmp_path / "inputs.pt")
    (tmp_path / "folder").mkdir()
    for index, row in enumerate(values):
        torch.save(row, tmp_path / "folder" / f"{index:02}.pt")
    for place in ("inputs.pt", "folder"):
        options = ["--input-shape", "8", "--data", tmp_path / place, "--check", "--samples", "16", "--json", "-"]
        _, out, _ = run(f"{models}:good", *options)
        (described,), check = (json.loads(out)[name] for name in ("inputs", "check"))
        assert described["mean"] == pytest.approx(float(values.mean()), rel=1e-4) and check == "data"


def test_a_numpy_file_is_data(run, models, tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "inputs.npy", numpy.arange(24, dtype="float32").reshape(3, 8))
    _, out, _ = run(f"{models}:good", "--input-shape", "8", "--data", tmp_path / "inputs.npy", "--json", "-")
    assert json.loads(out)["inputs"][0]["mean"] == pytest.approx(11.5)


def test_digits_are_data(run, models):
    pytest.importorskip("sklearn")
    options = ["--input-shape", "1,8,8", "--data", "digits", "--check", "--samples", "16", "--json", "-"]
    _, out, _ = run("torch.nn:Flatten", *options)
    described, check = json.loads(out)["inputs"][0], json.loads(out)["check"]
    assert check == "data" and 0.2 < described["mean"] < 0.4


def test_mnist_is_data(run, tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 2)):
        images = bytes(range(4)) * (count * 28 * 28 // 4)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + bytes(count))
    _, out, err = run(
        "torch.nn:Flatten", "--input-shape", "1,28,28", "--data", "mnist", "--root", tmp_path, "--json", "-"
    )
    assert json.loads(out)["inputs"][0]["mean"] == pytest.approx(1.5 / 255, rel=1e-4), err


def test_several_inputs(run, models):
    options = ["--input-shape", "4", "--input-shape", "4", "--std", "2", "--check", "--json", "-"]
    _, out, _ = run(f"{models}:TwoInputs", *options)
    result = json.loads(out)
    assert [given["std"] for given in result["inputs"]] == pytest.approx([2.0, 2.0])
    total = result["rows"][0]
    assert total["numbers"]["std"] == pytest.approx(8**0.5)
    assert total["measured"]["std"]["value"] == pytest.approx(8**0.5, rel=0.2)


def test_quantization_is_written_beside_the_rest(run, models, tmp_path):
    file = tmp_path / "ranges.json"
    code, out, _ = run(f"{models}:good", "--input-shape", "8", "--quantization", file, "--bits", "4", "--json", "-")
    assert code == 0 and json.loads(out)["model"] == "Sequential"
    found = json.loads(file.read_text())
    assert found["bits"] == 4 and [layer["weight"] for layer in found["layers"]] == ["0.weight", "2.weight"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ranges")] == ["ranges.json"]


def test_progress_is_a_bar_on_a_terminal_alone(run, models, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    arguments = [f"{models}:good", "--input-shape", "8", "--check", "--samples", "32", "--json", "-"]
    assert "\r" not in run(*arguments)[2] and "\x1b" not in run(*arguments)[2]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code, out, _ = run(*arguments)
    assert code == 0 and json.loads(out)["check"] == "gaussian"
    assert "inspect" in terminal.getvalue() and "running data" in terminal.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with command._progress() as progress:
        progress.reach("capturing the graph", 0, 4)
    assert log.getvalue() == ""  # what takes no time is not told of
    monkeypatch.setattr(command, "LOG_SECONDS", 0.0)
    with command._progress() as progress:
        progress.reach("capturing the graph", 0, 4)
        progress.reach("propagating moments (3 of 6 operations)", 1.5, 4)
    first, second = log.getvalue().splitlines()
    assert first.startswith("inspect:   0 % (0/4), ") and first.endswith(" elapsed, capturing the graph")
    assert second.startswith("inspect:  38 % (1.5/4), ") and " left, propagating moments (3 of 6" in second
    assert "\r" not in log.getvalue()


def test_the_home_folder_may_be_written_as_a_tilde(run, models, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).state_dict(), tmp_path / "weights.pt")
    options = ["--weights=~/weights.pt", "--json=~/out.json", "--html=~/out.html", "--quantization=~/ranges.json"]
    assert run(f"{models}:good", "--input-shape", "8", *options)[0] == 0
    assert all((tmp_path / name).is_file() for name in ("out.json", "out.html", "ranges.json"))


def in_a_process(*arguments):
    command = [sys.executable, "-m", "varprop", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_doctor_names_what_targets_need(capfd):
    with pytest.raises(SystemExit):
        main(["doctor"])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("models")]
    assert all(name in line for name in ("torchvision", "timm", "transformers", "safetensors", "pillow"))


@pytest.mark.zoo
def test_torchvision_beside_a_cpu_build_of_torch(models):
    """In a process of its own: here somebody may have prepared the import."""
    found = in_a_process("inspect", "torchvision:squeezenet1_1", "--input-shape", "3,64,64", "--json", "-")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["model"] == "SqueezeNet"
    unknown = in_a_process("inspect", "torchvision:resnet51")
    assert unknown.returncode == 2 and "Did you mean" in unknown.stderr and "resnet50" in unknown.stderr


def test_a_missing_package_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    code, _, err = run("torchvision:resnet18")
    assert code == 2 and err == "varprop: This needs torchvision: pip install torchvision.\n"


def test_half_an_import_of_torchvision_is_begun_again(run, monkeypatch, tmp_path):
    """A package that fails as torchvision does beside a CPU build, until its operators are declared."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from . import counted\n"
        "counted.tried.append(1)\n"
        "import builtins\n"
        "if not getattr(builtins, '_declared_operators', []):\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (package / "counted.py").write_text("tried = []\n")
    (package / "models.py").write_text(
        "from torch import nn\n"
        "def list_models():\n"
        "    return ['tiny']\n"
        "def get_model(name, weights):\n"
        "    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    declared = []
    monkeypatch.setattr("builtins._declared_operators", declared, raising=False)
    monkeypatch.setattr(torch.library, "define", lambda name, schema: declared.append(name))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("torchvision:tiny")[0] == 0
    assert sys.modules["torchvision.counted"].tried == [1]
    assert declared == ["torchvision::nms", "torchvision::qnms"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def test_a_class_in_a_package(run):
    code, out, _ = run("torch.nn:ReLU", "--input-shape", "4", "--json", "-")
    assert code == 0 and json.loads(out)["model"] == "ReLU"


def test_a_model_instead_of_a_function(run, tmp_path):
    (tmp_path / "made.py").write_text("from torch import nn\nmodel = nn.Linear(4, 2)\n")
    code, out, _ = run(f"{tmp_path / 'made.py'}:model", "--input-shape", "4", "--json", "-")
    assert code == 0 and json.loads(out)["model"] == "Linear"


@pytest.mark.parametrize("embedding", ["Embedding(9, 4)", "EmbeddingBag(9, 4)"])
def test_a_model_of_ones_own_that_reads_tokens(run, tmp_path, embedding):
    layers = f"nn.{embedding}, nn.ReLU(), nn.Linear(4, 2)"
    (tmp_path / "text.py").write_text(f"from torch import nn\ndef model():\n    return nn.Sequential({layers})\n")
    code, out, _ = run(f"{tmp_path / 'text.py'}:model", "--input-shape", "5", "--json", "-")
    assert code == 0 and [row["path"] for row in json.loads(out)["rows"]] == ["", "0", "1", "2"]


def test_the_seed_chooses_the_weights(run, models):
    def std(*options):
        _, out, _ = run(f"{models}:picture", "--input-shape", "3,6,6", "--json", "-", *options)
        return json.loads(out)["rows"][1]["numbers"]["std"]

    assert std() == std("--seed", "0") != std("--seed", "1")


MISTAKES = {
    "no colon": (["models"], "TARGET is"),
    "no file": (["nowhere.py:f"], "There is no file nowhere.py"),
    "no module": (["no_such_package:f"], "There is no module no_such_package"),
    "no function": (["{models}:nothing"], "has no function or class 'nothing'"),
    "nearly a function": (["{models}:pictur"], "has no function or class 'pictur'. Did you mean picture"),
    "factory raises": (["{models}:raises"], "models.py:25: RuntimeError: this cannot be built\n"),
    "factory raises without words": (["{models}:raises_without_words"], "models.py:28: KeyError\n"),
    "no model": (["{models}:no_module"], "must return an nn.Module, not int"),
    "unknown shape": (["{models}:good"], "give it by --input-shape"),
    "shape of letters": (["{models}:good", "--input-shape", "a,b"], "whole numbers"),
    "empty shape": (["{models}:good", "--input-shape", "0"], "1 and more"),
    "wrong shape": (["{models}:good", "--input-shape", "7"], "does not take inputs of shape (7,)"),
    "several inputs": (["{models}:TwoInputs", "--input-shape", "4"], "takes 2 inputs (a, b): give --input-shape once"),
    "unfit inputs": (["{models}:TwoInputs", "--input-shape", "4", "--input-shape", "3"], "shape (4,) and (3,)"),
    "data for several": (
        ["{models}:TwoInputs", "--input-shape", "4", "--input-shape", "4", "--data", "digits"],
        "--data is for one input",
    ),
    "no data file": (
        ["{models}:good", "--input-shape", "8", "--data", "none.pt"],
        "no file none.pt with data",
    ),
    "unreadable data": (["{models}:good", "--input-shape", "8", "--data", "{text}"], "cannot be read as a tensor"),
    "unfit data": (["{models}:good", "--input-shape", "8", "--data", "{tensor}"], "holds a tensor of shape (5, 7)"),
    "unreadable pictures": (["{models}:picture", "--input-shape", "3,6,6", "--data", "{pictures}"], "as a picture"),
    "no folder": (["{models}:good", "--input-shape", "8", "--quantization", "{empty}/no/q.json"], "There is no folder"),
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
    for folder in ("empty", "pictures"):
        (tmp_path / folder).mkdir()
    for index in range(2):
        (tmp_path / "pictures" / f"{index}.png").write_text("no picture")
    (tmp_path / "text.npy").write_text("no tensor")
    torch.save(torch.zeros(5, 7), tmp_path / "tensor.pt")
    names = {"models": models, "text": "text.npy", "tensor": "tensor.pt", "empty": "empty", "pictures": "pictures"}
    places = {name: tmp_path / place for name, place in names.items()}
    code, out, err = run(*(argument.format(**places) for argument in arguments))
    assert code == 2 and words in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert out in ("", "noise on standard output\n")


def test_debug_shows_the_traceback(run, models):
    code, _, err = run(f"{models}:raises", "--input-shape", "8", "--debug")
    assert code == 2 and "Traceback" in err


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
    assert code == 2 and words in err


def test_weights_that_run_code_are_refused(run, models, tmp_path):
    torch.save(nn.Linear(8, 16), tmp_path / "module.pt")
    code, _, err = run(f"{models}:good", "--input-shape", "8", "--weights", tmp_path / "module.pt")
    assert code == 2 and "could run code" in err


class Words(nn.Module):
    """Stands in for a language model of transformers."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(13, 6), nn.Linear(6, 3)

    def forward(self, input_ids, mask=None):
        return (self.head(self.table(input_ids)),)


def test_a_transformers_configuration(run, monkeypatch, tmp_path):
    config, folders = SimpleNamespace(vocab_size=13), []

    def from_folder(name, local_files_only):
        folders.append(name)
        return config if local_files_only else None

    package = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=lambda name: config, from_pretrained=from_folder),
        AutoModel=SimpleNamespace(from_config=lambda given: Words() if given is config else None),
    )
    monkeypatch.setitem(sys.modules, "transformers", package)
    code, out, _ = run("hf:words", "--input-shape", "7", "--json", "-")
    assert code == 0 and json.loads(out)["inputs"][0]["extents"] == [1, 7]
    assert run(f"hf:{tmp_path}", "--json", "-")[0] == 0 and folders == [str(tmp_path)]
    code, _, err = run("hf:words", "--data", "digits")
    assert code == 2 and "takes tokens" in err
    code, _, err = run("hf:words", "--positions")
    assert code == 2 and err == "varprop: hf:words takes tokens, and --positions is for images: leave it out.\n"


def test_a_timm_model_brings_its_shape(run, monkeypatch):
    def create_model(name, pretrained):
        model = nn.Sequential(nn.Conv2d(3, 2, 3))
        model.default_cfg = {"input_size": (3, 9, 9)}
        return model

    package = SimpleNamespace(
        is_model=lambda name: name == "small", create_model=create_model, list_models=lambda: ["small"]
    )
    monkeypatch.setitem(sys.modules, "timm", package)
    code, out, _ = run("timm:small", "--json", "-")
    assert code == 0 and json.loads(out)["inputs"][0]["extents"] == [1, 3, 9, 9]
    code, _, err = run("timm:smal")
    assert code == 2 and err == "varprop: timm has no model 'smal'. Did you mean small?\n"


def test_covariance_of_the_data_is_followed(models, run, tmp_path):
    torch.manual_seed(0)
    torch.save(torch.randn(64, 1) + 0.1 * torch.randn(64, 8), tmp_path / "data.pt")
    options = ["--input-shape", "8", "--json", "-", "--data", tmp_path / "data.pt", "--check", "--samples", "64"]
    independent, full = (
        json.loads(run(f"{models}:good", *options, *more)[1]) for more in ([], ["--covariance", "full"])
    )
    assert (independent["covariance"], full["covariance"]) == ("", "full")
    worst = [
        max(abs(row["numbers"]["std"] / row["measured"]["std"]["value"] - 1) for row in report["rows"])
        for report in (independent, full)
    ]
    assert worst[1] < 0.05 and worst[0] > 0.1
