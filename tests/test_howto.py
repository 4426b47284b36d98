"""The pages of docs/howto do what they say: their Python blocks run in order, each page by itself."""

from __future__ import annotations

import importlib.util
import re
import socket
import warnings
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("torchvision"):
    importlib.import_module("tests.torchvision_on_cpu")  # which other packages import where it is installed
FOLDER = Path(__file__).parents[1] / "docs" / "howto"
# The marker of pages that need a large package, and the package.
NEEDS = {
    "flower": (pytest.mark.flower, "flwr"),
    "huggingface": (pytest.mark.frameworks, "transformers"),
    "lightning": (pytest.mark.frameworks, "lightning"),
    "opacus": (pytest.mark.opacus, "opacus"),
    "timm": (pytest.mark.zoo, "torchvision"),
}
COMMANDS_ALONE = {"index", "ray"}
PAGES = sorted(page.stem for page in FOLDER.glob("*.md"))


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (FOLDER / f"{page}.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[NEEDS[page][0]] if page in NEEDS else [])
        for page in PAGES
        if page not in COMMANDS_ALONE
    ],
)
def test_the_blocks_of_a_page_run_in_order(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page][1], reason="the marker's make target installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if page == "distributed":  # which torchrun would set
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore" if page in NEEDS else "error")  # those packages warn of themselves
        torch.manual_seed(0)
        for block in blocks(page):
            exec(compile(block, f"{page}.md", "exec"), names)


def test_every_page_has_blocks_or_commands_alone() -> None:
    assert [page for page in PAGES if not blocks(page)] == sorted(COMMANDS_ALONE)
    assert set(NEEDS) < set(PAGES)


def test_the_index_names_every_page() -> None:
    index = (FOLDER / "index.md").read_text("utf-8")
    assert [page for page in PAGES if page != "index" and f"({page}.md)" not in index] == []
