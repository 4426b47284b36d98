"""Compiled code is compiled once, used for small networks, and missed by nobody where there is none."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.norm.native_cases import needs_compiler
from varprop.norm.native import build

REAL = build.compiled()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and nothing known from before."""
    monkeypatch.setenv("VARPROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VARPROP_NATIVE", raising=False)
    build._compiled.cache_clear()
    yield tmp_path
    build._compiled.cache_clear()


def compiler(place: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of our own, which counts its calls, as the first that is found."""
    place.mkdir()
    calls = f'[ "$1" = --version ] && echo own && exit 0\necho call >> {place}/calls\n'
    (place / "cc").write_text(f'#!/bin/sh\n{calls}while [ "$1" != -o ]; do shift; done\n{script}\n')
    (place / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")


def mlp() -> tuple[nn.Module, Tensor]:
    """The paper's: six hidden layers of 20 logistic units."""
    torch.manual_seed(0)
    widths = [784, *[20] * 6]
    hidden = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Sigmoid())]
    model = nn.Sequential(*hidden, nn.Linear(20, 10))
    return vp.normalize(model, vp.Moments(torch.zeros(1, 784), torch.ones(1, 784))), torch.randn(8, 784)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of all parameters."""
    output = model(x)
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]


def natives(model: nn.Module) -> list[bool]:
    """For every fold of the model, whether compiled code did it."""
    (plan, _) = model[0].place[True]
    return [found is not None for found in plan.executor.natives.values()]


@needs_compiler
def test_the_small_mlp_is_folded_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    other = copy.deepcopy(model)
    ours = trained(model, x)
    assert natives(model) == [True]
    monkeypatch.setenv("VARPROP_NATIVE", "0")
    theirs = trained(other, x)
    assert natives(other) == [False]
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())


@needs_compiler
def test_it_is_compiled_once(fresh: Path) -> None:
    first = build.compiled()
    assert first.library is not None and Path(first.status).is_file()
    assert build.describe_native() == f"small networks on the CPU are folded by compiled code: {first.status}"
    written = Path(first.status).stat().st_mtime_ns
    build._compiled.cache_clear()
    second = build.compiled()
    assert second.status == first.status and Path(second.status).stat().st_mtime_ns == written
    assert [path.suffix for path in Path(first.status).parent.iterdir()] == [".so"]


def test_without_a_compiler_torch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    monkeypatch.setenv("PATH", "")
    model, x = mlp()
    assert all(part.isfinite().all() for part in trained(model, x))
    assert natives(model) == [False]
    assert build.compiled().status == "no C compiler (cc, gcc or clang) on PATH"
    assert capfd.readouterr() == ("", "")  # type: ignore[attr-defined]


def test_a_compiler_that_fails_makes_no_noise(fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    compiler(fresh / "bin", "echo broken >&2; exit 3", monkeypatch)
    model, x = mlp()
    assert all(part.isfinite().all() for part in trained(model, x))
    assert natives(model) == [False]
    assert build.compiled().status.endswith("failed: broken")
    assert not list((fresh / "cache" / "native").iterdir())
    assert capfd.readouterr() == ("", "")  # type: ignore[attr-defined]


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "cache").write_text("a file where the directory should be")
    assert build.compiled().library is None
    model, x = mlp()
    assert all(part.isfinite().all() for part in trained(model, x))


def test_it_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARPROP_NATIVE", "0")
    assert build.compiled() == build.Compiled(None, "switched off by VARPROP_NATIVE=0")
    assert build.describe_native().endswith(
        "folded by torch operations, which is slower: switched off by VARPROP_NATIVE=0"
    )
    assert not (fresh / "cache").exists()


@needs_compiler
def test_threads_that_ask_at_once_compile_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(fresh / "bin", f"sleep 0.2; cp {REAL.status} $2", monkeypatch)
    ready = threading.Barrier(4)

    def ask(_: int) -> build.Compiled:
        ready.wait()
        return build.compiled()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert all(one.library is found[0].library is not None for one in found)
    assert (fresh / "bin" / "calls").read_text().count("call") == 1


# Loads build.py by itself: what it does needs no torch, and so a process starts at once.
SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = importlib.util.module_from_spec(spec)
sys.modules["build"] = build
spec.loader.exec_module(build)
found = build.compiled()
print(found.library is not None and found.library.fold_forward_float is not None)
"""


@needs_compiler
def test_processes_that_compile_at_once_do_no_harm(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file grows slowly: who loaded it before it is whole would fail."""
    slowly = f"head -c 1000 {REAL.status} > $2; sleep 0.3; cp {REAL.status} $2"
    compiler(fresh / "bin", slowly, monkeypatch)
    command = [sys.executable, "-c", SCRIPT, build.__file__]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["True"] * 4
    assert [path.suffix for path in (fresh / "cache" / "native").iterdir()] == [".so"]


@needs_compiler
def test_a_damaged_library_is_replaced(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(fresh / "bin", f"cp {REAL.status} $2", monkeypatch)
    place = build._place(build._compiler())
    place.parent.mkdir(parents=True)
    place.write_bytes(b"no library")
    assert build.compiled().library is not None
    assert (fresh / "bin" / "calls").read_text().count("call") == 1


@needs_compiler
def test_another_source_compiler_or_flag_makes_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._compiler()
    places = [build._place(real)]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    places.append(build._place(real))
    changed = shutil.copytree(build.SOURCES, fresh / "sources")
    (changed / "fold.c").write_text("/* other */")
    monkeypatch.setattr(build, "SOURCES", changed)
    places.append(build._place(real))
    monkeypatch.setattr(build, "_processor", lambda: b"other")
    places.append(build._place(real))
    compiler(fresh / "bin", "exit 1", monkeypatch)
    places.append(build._place(build._compiler()))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("environment", "expected"),
    (
        ({"VARPROP_CACHE": "/own"}, "/own"),
        ({"XDG_CACHE_HOME": "/base"}, "/base/varprop"),
        ({"HOME": "/home/me"}, "/home/me/.cache/varprop"),
    ),
)
def test_where_it_is_kept(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VARPROP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert build.cache_directory() == Path(expected)
