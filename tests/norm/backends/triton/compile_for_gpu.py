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
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from varprop.norm.backends.triton import fold_rows, fold_whole, moments, unfold_rows, unfold_whole
from varprop.norm.backends.triton.blocks import COLUMNS, WARPS, WARPS_BACK, Kind, Launch, shapes_of
from varprop.norm.backends.triton.components import BLOCK, BLOCK_INTEGRATED
from varprop.norm.backends.triton.lane_tables import _gathered
from varprop.norm.backends.triton.launch import _ENTRIES, _PARTIALS, _constants, _whole_constants
from varprop.norm.backends.triton.opcodes import (
    CLAMP,
    FIRST_INTEGRATED,
    GELU,
    LINEAR,
    OPERATIONS,
    PAIRS,
    SIGMOID,
    TWO_SLOPES,
)
from varprop.norm.backends.triton.whole import BY_TAPS, WholeLaunch, body_of, most_rounds, registers_of, warps_of
from varprop.norm.layout import Rows

INT32 = [
    "blocks",
    "programs",
    "operations",
    "first",
    "second",
    "output",
    "entry",
    "entry_lane",
    "owned",
    "owned_span",
    "columns",
]
INT64 = ["sites", "pointers", "records"]
DOUBLE = ["share", "covariance", "numbers", "nodes", "knots", "constant_mean", "constant_var", "slopes"]
SIZES = ["sources", "constants", "given", "computed"]
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
    made = compiled(unfold_rows.add_partials, {"ROWS": _PARTIALS, "COLUMNS": COLUMNS}, 4)
    return f"threadsPerWarp = [1, {COLUMNS}]" in made.asm["ttgir"]


def kinds_of(every: bool) -> dict[str, Kind]:
    """Kinds of weights: all that occur in residual networks, or many more."""
    single, half, double = torch.float32, torch.bfloat16, torch.float64
    kinds = {
        "1 tap, aligned": Kind(1, True, True, False, False, single),
        "9 taps": Kind(16, False, False, False, False, single),
        "9 taps, channels last": Kind(16, True, True, False, False, single),
    }
    if every:
        kinds |= {
            "1 tap": Kind(1, True, False, False, False, single),
            "49 taps": Kind(64, False, False, False, False, single),
            "121 taps": Kind(64, False, False, True, False, single),
            "9 taps, strided": Kind(16, False, False, False, True, single),
            "1 tap, bfloat16": Kind(1, True, True, False, False, half),
            "9 taps, float64": Kind(16, False, False, False, False, double),
        }
    return kinds


def row_kernels(every: bool):
    """Launches of tiles, several to a row."""
    for name, kind in kinds_of(every).items():
        for backward in (False, True):
            for body in (1, 2, 4) if every else (1, 4):
                own = replace(kind, taps=1, many=kind.taps > 1) if backward and kind.inner else kind
                warps = WARPS_BACK if backward and own.taps == 1 else WARPS
                yield name, Launch(own, shapes_of(own.taps, backward), torch.empty(0), body, warps), backward


def whole_kernels(every: bool):
    """Blocks of whole rows: of each kind the longest and shorter ones, there and back."""
    none = [torch.empty(0)] * 3
    for name, kind in kinds_of(every).items():
        taps = 9 if kind.taps == 16 else kind.taps
        spread = 1 if taps == 1 else 9
        for backward in (False, True):
            sites = [
                Rows(64, 1, BY_TAPS[1] // taps >> n, torch.ones(taps, spread), 0, 0, 0) for n in (0, 1, 2, 3, 4, 6)
            ]
            found = [(body_of(rows, kind), rows) for rows in sites]
            bodies = [replace(b, rounds=most_rounds(b, rows, backward)) for b, rows in found if b is not None]
            for body in dict.fromkeys(bodies):
                warps = warps_of(body, backward)
                label = f"{name}, {body.rows} x {body.channels}, {warps} warps"
                yield (
                    label,
                    WholeLaunch(kind.dtype, warps, registers_of(kind.dtype, warps, backward), (body,), *none),
                    backward,
                )


def main() -> int:
    """Compiles everything; returns whether a kernel of float32 weights spills or reads badly."""
    every, spilled = "--all" in sys.argv, 0
    for name, launch, backward in row_kernels(every):
        kernel = unfold_rows.backward if backward else fold_rows.forward
        label = f"{'backward' if backward else 'forward'}, {name}, {launch.shapes.of(launch.bodies // 2)}"
        constants = {name: value for name, value in _constants(launch).items() if name != "num_warps"}
        bytes_spilled = compile_kernel(label, kernel, constants, launch.warps)
        spilled += bytes_spilled if launch.kind.dtype != torch.float64 else 0
    for name, launch, backward in whole_kernels(every):
        kernel = unfold_whole.backward if backward else fold_whole.forward
        constants = _whole_constants(launch)
        warps, registers = constants.pop("num_warps"), constants.pop("maxnreg", None)
        label = f"{'backward' if backward else 'forward'}, {name}, whole rows"
        bytes_spilled = compile_kernel(label, kernel, constants, warps, registers=registers)
        allowed = 0 if registers is None else SPILLED
        spilled += bytes_spilled if launch.dtype != torch.float64 and bytes_spilled > allowed else 0
    sums = {"ROWS": _PARTIALS, "COLUMNS": COLUMNS}
    spilled += compile_kernel("sums of blocks", unfold_rows.add_partials, sums, 4)
    pairs = sum(1 << code for code in PAIRS)
    groups = {
        "rectifiers": 1 << TWO_SLOPES | 1 << LINEAR | pairs,
        "clamp": 1 << CLAMP,
        "sigmoid": 1 << SIGMOID,
        "gelu": 1 << GELU,
    }
    for name, codes in groups.items():
        block = BLOCK_INTEGRATED if codes >> FIRST_INTEGRATED else BLOCK
        constants = {"OPS": codes, "BLOCK": block, "ENTRIES": _ENTRIES}
        spilled += compile_kernel(f"moments, {name}", moments.forward, constants, 4, True)
    if every:
        constants = {"OPS": (1 << OPERATIONS) - 1, "BLOCK": BLOCK_INTEGRATED, "ENTRIES": _ENTRIES}
        compile_kernel("moments, all functions", moments.forward, constants, 4, True)
    for most in (1, 2, 8):
        lanes, entries = _gathered(most)
        back = {"OPS": pairs, "BLOCK": BLOCK, "LANES": lanes, "ENTRIES": entries, "ONTO": True}
        spilled += compile_kernel(f"moments backward, {entries} entries", moments.backward, back, 4, True)
    in_lines = partial_sums_are_read_in_lines()
    print(f"partial sums are read {'in lines' if in_lines else 'with gaps'}")
    return int(spilled > 0 or not in_lines)


if __name__ == "__main__":
    sys.exit(main())
