"""Use an installed varprop outside the checkout: `python smoke_wheel.py core`, or `lab` where that extra is installed.

Run by `make test-wheel`. It shows that the wheel is complete (templates of pages, types)
and that the messages on what is missing name what helps.
"""

import json
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import varprop as vp

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def image():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""


def command(*words: str, status: int = 0) -> str:
    done = subprocess.run(["varprop", *words], capture_output=True, text=True)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def check_core() -> None:
    assert find_spec("scipy") is None and find_spec("matplotlib") is None, "the environment is not clean"
    assert "site-packages" in vp.__file__ and metadata.version("varprop") == vp.__version__
    assert resources.files("varprop").joinpath("py.typed").is_file()
    torch.manual_seed(0)
    x = torch.rand(64, 3, 8, 8)
    moments = vp.input_moments(x)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model = vp.normalize(plain, moments)
    model(x).square().mean().backward()
    assert torch.allclose(vp.fold(model).eval()(x), model.eval()(x), atol=1e-5)
    print(vp.fold_report(model))
    assert vp.propagate(plain.eval(), moments).output.mean.shape == (1, 2)
    dropped = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    assert vp.predict(dropped, torch.randn(3, 4)).std.shape == (3, 2)
    assert vp.callbacks.LayerWatcher(plain, moments, to=print).predicted()
    try:
        vp.find_lr(lambda rate: rate)
    except ImportError as error:
        assert "pip install '.[lab]' in a checkout of varprop" in str(error)
    else:
        raise AssertionError("find_lr did without scipy")
    assert vp.__version__ in command("--version")
    assert "torch" in command("doctor")
    said = command("demo", status=2)
    assert "pip install '.[lab]' in a checkout of varprop." in said, said
    with tempfile.TemporaryDirectory() as folder:
        file, page = Path(folder, "models.py"), Path(folder, "report.html")
        file.write_text(MODEL)
        command("inspect", f"{file}:make", "--input-shape", "8", "--html", str(page))
        assert "</html>" in page.read_text("utf-8")
        rows = json.loads(
            subprocess.check_output(["varprop", "inspect", f"{file}:make", "--input-shape", "8", "--json", "-"])
        )
        assert rows["rows"]


def check_lab() -> None:
    import varprop_lab

    assert "site-packages" in varprop_lab.__file__
    assert vp.find_lr(lambda rate: (rate - 1e-3) ** 2, (1e-4, 1e-2), maxiter=8).lr > 0
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "models.py"), Path(folder, "runs")
        file.write_text(MODEL)
        small = [
            "--methods",
            "standard,analytic",
            "--starts",
            "none",
            "--seeds",
            "1",
            "--epochs",
            "1",
            "--device",
            "cpu",
        ]
        command("compare", "--model", f"{file}:image", "--dataset", "digits", "--out", str(out), *small)
        assert list(out.rglob("*.html"))


if __name__ == "__main__":
    {"core": check_core, "lab": check_lab}[sys.argv[1]]()
    print(f"{sys.argv[1]}: as it should be")
