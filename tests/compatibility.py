"""docs/compatibility.md from the tests that prove its rows: `python -m tests.compatibility` writes it.

A test says which row it proves by `@pytest.mark.compatibility("eager")`. The files are read, not imported: frameworks
that are not installed do not matter.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"

# name of a row: what holds
ROWS = {
    "eager": "values and all gradients are those of the formulas",
    "torch.compile": "one graph without a break, forward and backward, from the first step on",
    "torch.compile, inductor": "the default backend and mode",
    "torch.compile, reduce-overhead": "CUDA graphs",
    "torch.compile, dynamic": "one graph for batches of any size",
    "torch.export": "also after parameters have changed",
    "AMP": "autocast to bfloat16 and float16 with statistics in float32; GradScaler",
    "DDP": "two processes train like one",
    "FSDP": "`fully_shard` on the model, or on its blocks and the model; on blocks without the model it is refused",
    "gradient checkpoints": "around blocks, reentrant or not",
    "functional_call": "statistics follow from the parameters that are passed",
    "vmap": "over parameters, statistics included",
    "jvp": "forward mode agrees with reverse mode",
    "double backward": "second derivatives, gradient penalties",
    "forward hooks": "a hook that changes outputs counts in the statistics if it was registered before `vp.normalize`; "
    "if it was registered later its change is applied, but the statistics are those of the model without it",
    "EMA": "`torch.optim.swa_utils.AveragedModel`; there are no buffers to average",
    "deepcopy, pickle": "copies are independent; whole models, and state dicts into fresh models",
    "ONNX": "`vp.fold(model)`, then export. The normalized model itself is exported with its fold in the graph; with "
    "`dynamo=False` it is refused",
    "torch.jit": "`vp.fold(model)`, then trace; tracing the normalized model is refused. Traced modules inside a "
    "model stay as they are; a model that calls scripted modules is refused",
    "quantization": "`vp.fold(model)`, then torch.ao.quantization; refused on the normalized model",
    "tensor parallel": "`vp.fold(model)`, then `parallelize_module`; refused on the normalized model: train with "
    "`fully_shard`",
    "DataParallel": "refused: use DistributedDataParallel",
    "custom linear layers": "of other libraries and your own, such as `Conv1D` of transformers (GPT-2) and `Linear` of "
    "PyTorch Geometric: any layer that multiplies one argument by its `weight`, (out, in) or (in, out), and adds its "
    "`bias`",
    "parametrizations": "statistics follow the parametrized weight; `vp.fold` writes it out, with a warning",
    "computed weights": "layers whose weight comes from a hypernetwork, a property or `functional_call` stay plain, "
    "with a warning",
    "parts in another dtype": "such as a float64 block in a float32 model; a layer whose own parameters differ is "
    "refused",
    "packed sequences": "recurrent layers treat every packed sequence as if it were alone",
    "Lightning, Trainer, accelerate": "training gives the same result as a loop by hand; the Trainer of transformers "
    "also saves and loads",
    "Flower": "FedAvg on the parameters, after `vp.unit_norm_`; there are no buffers",
    "Opacus": "`varprop.opacus.PrivacyEngine`: hooks, functorch, ew, ghost; Poisson sampling, virtual steps",
}
# who runs a test, by its markers; the others are run by `make test`
TARGETS = {
    "gpu": "test-gpu",
    "opacus": "test-opacus",
    "flower": "test-flower",
    "frameworks": "test-frameworks",
    "slow": "test-slow",
}


@dataclass(frozen=True)
class Proof:
    """A test that proves a row."""

    row: str
    file: str
    test: str
    target: str


@functools.cache
def proofs(folder: Path = ROOT / "tests") -> list[Proof]:
    """All of them, in the order of files and lines."""
    return [proof for file in sorted(folder.rglob("test_*.py")) for proof in proofs_in(file, folder)]


def proofs_in(file: Path, folder: Path) -> Iterator[Proof]:
    """Those of one file."""
    tree = ast.parse(file.read_text("utf-8"))
    everywhere = [name for node in tree.body if _assigns_marks(node) for name, _ in _marks(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found = [mark for decorator in node.decorator_list for mark in _marks(decorator)]
            names = {*everywhere, *(name for name, _ in found)}
            target = next((TARGETS[name] for name in TARGETS if name in names), "test")
            for name, row in found:
                if name == "compatibility":
                    yield Proof(row, file.relative_to(folder.parent).as_posix(), node.name, target)


def _assigns_marks(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def _marks(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every marker within, with its first argument where that is a text."""
    arguments = {id(node.func): node.args for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
            first = next(iter(arguments.get(id(node), ())), None)
            yield node.attr, str(first.value) if isinstance(first, ast.Constant) else ""


def page(found: list[Proof]) -> str:
    """The text of the page."""
    lines = [
        "# Compatibility",
        "",
        "What a normalized model works with, and the tests that prove it. `python -m tests.compatibility` writes",
        "this page from markers in the tests; `.ci/run` runs all of them except those of `make test-gpu`.",
        "",
        "| with | what holds | proved by | run by |",
        "|---|---|---|---|",
    ]
    for row, text in ROWS.items():
        own = [proof for proof in found if proof.row == row]
        tests = "<br>".join(f"[`{proof.test}`](../{proof.file})" for proof in own)
        targets = ", ".join(f"`make {target}`" for target in dict.fromkeys(proof.target for proof in own))
        lines.append(f"| {row} | {text} | {tests} | {targets} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(proofs()), "utf-8")
