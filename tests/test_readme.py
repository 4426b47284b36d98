"""The README does what it says: its Python blocks run in order, print what stands below them, and its calls exist."""

import contextlib
import copy
import io
import json
import re
import statistics
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.rules.registry import unregister

TEXT = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", TEXT, re.DOTALL)
CALLS = sorted(set(re.findall(r"`(vp\.\w+\([^`]*\))`", TEXT)))


def words(text):
    """Every word of a text, numbers as such."""
    return [float(word) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", word) else word for word in text.split()]


def same(first, second):
    if isinstance(first, float) and isinstance(second, float):
        return second == pytest.approx(first, rel=0.01)
    return first == second or set(str(first)) == set(str(second)) == {"-"}


def test_the_blocks_run_in_order_and_print_what_stands_below_them():
    names: dict[str, object] = {}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("error")
        for code, expected in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            found, wanted = words(printed.getvalue()), words(expected)
            assert len(found) == len(wanted) and all(map(same, found, wanted)), printed.getvalue()
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize(
    ("page", "last"),
    [
        ("index.md", "folded"),
        ("start.md", "folded"),
        ("predict.md", "variances"),
        ("covariance.md", "result"),
        ("callbacks.md", "watcher"),
        ("initialization.md", "moments"),
        pytest.param("inspector.md", "comparison", marks=pytest.mark.slow),
        pytest.param("experiments.md", "result", marks=pytest.mark.slow),
    ],
)
def test_the_blocks_of_a_page_run(page, last, tmp_path, monkeypatch):
    text = (Path(__file__).parents[1] / "docs" / page).read_text("utf-8")
    blocks = [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)]
    monkeypatch.chdir(tmp_path)
    # Graphs run as they are: the compiler takes half a minute, and a slow test of predict holds it against this.
    monkeypatch.setattr("torch._inductor.compile", lambda graph, tensors: graph)
    if page == "inspector.md":  # whose first block is a file that the second imports
        (tmp_path / "network.py").write_text(blocks.pop(0), "utf-8")
        monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="vp.fold will in general give a bias")
        for code in blocks:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)
    assert last in names


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_it_names_can_be_made(call):
    x = torch.rand(16, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    moments = vp.input_moments(x)
    names = {
        "vp": vp,
        "model": vp.normalize(model, moments) if "fold" in call or "unchanged" in call else copy.deepcopy(model),
        "moments": moments,
        "example": x[:1],
        "loader": [x],
        "plain": model,
        "x": x,
        "vocabulary": 7,
        "objective": lambda rate: (rate - 1e-3) ** 2,
        "op": torch.ops.aten.bucketize,  # an operation without a rule
    }
    try:
        eval(call, names)
    finally:
        unregister(names["op"])


def test_the_zoo_is_counted_as_its_records_are():
    models = json.loads((Path(__file__).parents[1] / "docs" / "results" / "zoo.json").read_text("utf-8"))
    done, total = re.search(r"(\d+) of (\d+) public models", TEXT).groups()
    assert (int(done), int(total)) == (sum(model["status"] == "done" for model in models), len(models))


def test_pages_say_of_the_zoo_what_its_records_say():
    docs = Path(__file__).parents[1] / "docs"
    models = [m for m in json.loads((docs / "results" / "zoo.json").read_text("utf-8")) if m["status"] == "done"]
    alike = [model["median_error"] for model in models]
    apart = [model["apart_error"] for model in models if model.get("apart_error") is not None]
    off, mended = sum(error > 0.1 for error in alike), sum(error <= 0.1 for error in apart)
    faq, inspector = (" ".join((docs / page).read_text("utf-8").split()) for page in ("faq.md", "inspector.md"))
    median = f"the std of the median public model is {100 * statistics.median(alike):.0f} % off"
    assert f"{median}, {off} of {len(models)} are more than 10 % off, {off - mended} if every position" in faq
    assert f"Of {len(apart)} models that were more than 10 % off with positions alike, {mended} come" in inspector


def test_it_stays_short():
    assert len(TEXT.split()) <= 900
