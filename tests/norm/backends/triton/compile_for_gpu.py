"""Compiles the kernels for an H100 or H200 without one, and shows what each takes: what the interpreter lets pass, the
compiler may not.

Run as ``TRITON_INTERPRET=0 python -m tests.norm.backends.triton.compile_for_gpu [--all]``; it prints a line per
kernel and ends with an error if one spills registers to memory or reads where it should not.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from varprop.norm.backends.triton import moment_kernels, row_kernels
from varprop.norm.backends.triton.functions import (
    CLAMP,
    FIRST_INTEGRATED,
    GELU,
    LINEAR,
    OPERATIONS,
    PAIRS,
    SIGMOID,
    TWO_SLOPES,
)
from varprop.norm.backends.triton.moments import BLOCK, BLOCK_INTEGRATED, ENTRIES, gathered_at_once
from varprop.norm.backends.triton.rows import COLUMNS, LONGEST, PARTIALS, Launch, TritonRows

from .reference import Shape, make_layout

INT32 = [
    "programs",
    "operations",
    "first",
    "second",
    "output",
    "entry",
    "entry_channel",
    "summed",
    "summed_span",
]
INT64 = ["records", "columns"]
DOUBLE = ["share", "covariance", "numbers", "nodes", "knots", "constant_mean", "constant_var", "slopes"]
SIZES = ["sources", "constants", "external", "computed"]
SPILLED = 96  # bytes of a thread, at most, where its registers are limited: one more block makes up for them
HALF = ["folded", "bias", "grad_folded", "grad_bias"]


def type_of(name: str, of_lanes: bool) -> str:
    """The type of an argument, as triton writes it."""
    lanes = ("mean", "var", "grad_mean", "grad_var") if of_lanes else ()
    for names, kind in ((INT32, "*i32"), (INT64, "*i64"), (DOUBLE, "*fp64"), (SIZES, "i32"), (HALF, "*bf16")):
        if name in names:
            return kind
    return "*fp64" if name in lanes else "*fp32"


def compiled(kernel, constants: dict, warps: int, of_lanes: bool = False, registers: int | None = None):
    """One kernel, compiled for Hopper."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, of_lanes) for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": registers})


def compile_kernel(
    label: str, kernel, constants: dict, warps: int, of_lanes: bool = False, registers: int | None = None
) -> int:
    """Compiles one kernel, prints what it takes and returns the bytes it spills."""
    made = compiled(kernel, constants, warps, of_lanes, registers)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [str(assembler), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(p, told)[1]) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    wide, ahead = made.asm["ptx"].count("ld.global.v4.b32"), made.asm["ptx"].count("cp.async.cg")
    shared = made.metadata.shared
    print(
        f"{label:60} {registers:4} registers {spilled:5} spilled {shared:6} shared {wide:4} wide loads {ahead:4} ahead"
    )
    return spilled


def partial_sums_are_read_in_lines() -> bool:
    """Whether the threads of a warp read neighbours; the compiler does not see to it unless it shows in the code."""
    made = compiled(row_kernels.add_partials, {"ROWS": PARTIALS, "COLUMNS": COLUMNS}, 4)
    return f"threadsPerWarp = [1, {COLUMNS}]" in made.asm["ttgir"]


def shapes_of(every: bool) -> dict[str, list[Shape]]:
    """Sites that share a launch: whole rows of all lengths as in residual networks, rows in pieces; or many more."""
    lengths = LONGEST // 9, 512, 64
    last = [Shape(64, length, (3, 3), padded=True, channels_last=True) for length in lengths]
    single = [Shape(64, length, (1, 1)) for length in (2048, 256, 64)]
    stem, plain = Shape(64, 3, (7, 7), padded=True), Shape(64, 512, (3, 3), padded=True)
    depthwise = Shape(1, 1, (3, 3), groups=128, padded=True)
    found = {"channels last": [stem, *last, *single], "in pieces": [stem, plain, depthwise]}
    few = {"centred": [last[1], single[1]], "centred, in pieces": [plain, depthwise]}
    everything = {f"{name}, centred": shapes for name, shapes in found.items()}
    chosen = {**few, **(everything if every else {})}
    found |= {name: [replace(shape, centred=True) for shape in shapes] for name, shapes in chosen.items()}
    if every:
        found |= {
            "channels last, no padding": [replace(shape, padded=False) for shape in last],
            "long rows": [Shape(8, 40000), Shape(8, 40001), Shape(8, 2000, (3, 3), channels_last=True)],
            "many taps": [Shape(8, 3, (11, 11), padded=True), Shape(8, 200, (11, 11), channels_last=True)],
            "transposed": [Shape(64, 64, (2, 2), transposed=True, channels_last=True)],
            "bfloat16": [replace(shape, dtype=torch.bfloat16) for shape in (last[1], single[1], plain)],
            "float64": [replace(shape, dtype=torch.float64) for shape in (last[2], single[3], plain)],
        }
    return found


def row_launches(every: bool) -> Iterator[tuple[str, Launch, bool]]:
    """The launches that fold sites of these shapes.

    Backward with all bodies, since the one that takes most registers sets how many blocks run at a time; forward, where
    that is limited, body by body, to see what each spills.
    """
    for name, shapes in shapes_of(every).items():
        layout, weights = make_layout(shapes)
        tables = TritonRows(layout, torch.device("cpu")).tables(weights)
        for launch in tables.forward:
            yield from ((name, replace(launch, bodies=(body,)), False) for body in launch.bodies)
        yield from ((name, launch, True) for launch in tables.backward)


def main() -> int:
    """Compiles everything; returns whether a kernel of float32 weights spills or reads badly."""
    every, spilled = "--all" in sys.argv, 0
    for name, launch, backward in row_launches(every):
        constants = dict(launch.constants)
        warps, registers = constants.pop("num_warps"), constants.pop("maxnreg", None)
        label = f"{'backward' if backward else 'forward'}, {name}, {launch.shapes[0][1:]}, {warps} warps"
        kernel = row_kernels.backward if backward else row_kernels.forward
        bytes_spilled = compile_kernel(label, kernel, constants, warps, registers=registers)
        allowed = 0 if registers is None else SPILLED
        spilled += bytes_spilled if launch.dtype != torch.float64 and bytes_spilled > allowed else 0
    sums = {"ROWS": PARTIALS, "COLUMNS": COLUMNS}
    spilled += compile_kernel("sums of blocks", row_kernels.add_partials, sums, 4)
    pairs = sum(1 << code for code in PAIRS)
    groups = {
        "rectifiers": 1 << TWO_SLOPES | 1 << LINEAR | pairs,
        "clamp": 1 << CLAMP,
        "sigmoid": 1 << SIGMOID,
        "gelu": 1 << GELU,
    }
    for name, codes in groups.items():
        block = BLOCK_INTEGRATED if codes >> FIRST_INTEGRATED else BLOCK
        constants = {"OPS": codes, "BLOCK": block, "ENTRIES": ENTRIES}
        spilled += compile_kernel(f"moments, {name}", moment_kernels.forward, constants, 4, True)
    if every:
        constants = {"OPS": (1 << OPERATIONS) - 1, "BLOCK": BLOCK_INTEGRATED, "ENTRIES": ENTRIES}
        compile_kernel("moments, all functions", moment_kernels.forward, constants, 4, True)
    for most in (1, 2, 8):
        channels, entries = gathered_at_once(most)
        back = {"OPS": pairs, "BLOCK": BLOCK, "CHANNELS": channels, "ENTRIES": entries}
        spilled += compile_kernel(f"moments backward, {entries} entries", moment_kernels.backward, back, 4, True)
    in_lines = partial_sums_are_read_in_lines()
    print(f"partial sums are read {'in lines' if in_lines else 'with gaps'}")
    return int(spilled > 0 or not in_lines)


if __name__ == "__main__":
    sys.exit(main())
