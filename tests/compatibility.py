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
    "torch.compile, dynamic": "batches of any size from one graph",
    "torch.export": "also after parameters have changed",
    "AMP": "autocast to bfloat16 and float16, statistics in float32; GradScaler",
    "DDP": "two processes train like one",
    "FSDP": "`fully_shard` of the model, of its blocks too; of blocks without the model is refused",
    "gradient checkpoints": "around blocks, reentrant or not",
    "functional_call": "other parameters, and statistics that follow from them",
    "vmap": "over parameters, statistics included",
    "jvp": "forward mode agrees with reverse mode",
    "double backward": "second derivatives, gradient penalties",
    "forward hooks": "one that changes outputs counts in the statistics if it was there before `vp.normalize`; if it "
    "was added later its change is applied, and the statistics are those of the model without it",
    "EMA": "`torch.optim.swa_utils.AveragedModel`: there are no buffers to follow",
    "deepcopy, pickle": "copies stand on their own; whole models, and state dicts into fresh ones",
    "ONNX": "`vp.fold(model)`, then export; the normalized model itself is exported with its fold in the graph, "
    "and with `dynamo=False` refused",
    "torch.jit": "`vp.fold(model)`, then trace; a trace of the normalized model is refused. Traced modules inside a "
    "model stay as they are; one that calls scripted modules is refused",
    "quantization": "`vp.fold(model)`, then torch.ao.quantization; of the normalized model it is refused",
    "tensor parallel": "`vp.fold(model)`, then `parallelize_module`; of the normalized model it is refused: train with "
    "`fully_shard`",
    "DataParallel": "refused: use DistributedDataParallel",
    "custom linear layers": "of other libraries and your own, such as `Conv1D` of transformers (GPT-2) and `Linear` of "
    "PyTorch Geometric: each that multiplies one argument by its `weight`, (out, in) or (in, out), and adds its `bias`",
    "parametrizations": "statistics follow the parametrized weight; `vp.fold` writes it out, with a warning",
    "computed weights": "layers whose weight a hypernetwork, a property or `functional_call` gives stay plain, with a "
    "warning",
    "parts in another dtype": "as a float64 block in a float32 model; a layer whose own parameters differ is refused",
    "packed sequences": "recurrent layers on packed sequences: each as if it were alone",
    "Lightning, Trainer, accelerate": "trained as by hand; by the Trainer of transformers saved and loaded too",
    "Flower": "FedAvg on the parameters, with `vp.unit_norm_` before: there are no buffers",
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
        "What a normalized model works with, and the tests that prove it. Written by `python -m tests.compatibility`",
        "from the markers of the tests; `.ci/run` runs all of them but those of `make test-gpu`.",
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
