"""Which models of the public collections propagate, how fast, and how near to Monte Carlo.

python benchmarks/zoo.py [MODEL ...] [--list FILE] [--out DIR] [--samples 16] [--limit 300] [--again]

A model is named group/name, as torchvision/resnet18, timm/vit_tiny_patch16_224, hf/bert, smp/Unet, monai/UNet. All have
random weights. Each is captured, counted (exact, approximate and missing operations) and propagated from a standard
normal input on uniform axes, in a process of its own with a time limit. Then standard normal inputs (tokens of equal
probability), one after another, go through it: for every module called once, the analytic and the measured std are
compared, each as the root mean square over the module's units. Results are appended to DIR/zoo.jsonl (models already
there are left out unless --again), and DIR/zoo.md is written anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
Inputs = dict[str, Any] | tuple[Any, ...]  # every leaf a shape (Gaussian), or the number of tokens and a length
PACKAGES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "hf": "transformers",
    "smp": "segmentation_models_pytorch",
    "monai": "monai",
}
VIDEO = {"mvit": (16, 224, 224), "swin3d": (16, 224, 224), "s3d": (16, 224, 224)}
CLIPS = dict.fromkeys(("mc3", "r2plus1d", "r3d"), (16, 112, 112))
FEW = ["alexnet", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1"]

# Small settings for every architecture of transformers, whose names for them differ.
WIDE = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "num_key_value_heads": 2, "head_dim": 32, "n_embd": 128, "n_layer": 2, "n_head": 4, "dim": 128, "n_layers": 2,
    "n_heads": 4, "hidden_dim": 256, "embedding_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128, "d_model": 128,
    "num_layers": 2, "num_heads": 4, "d_ff": 256, "d_kv": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
}  # fmt: skip
OWN_SIZE = {"swin", "resnet", "convnext", "segformer", "mamba"}  # given by stages: taken as they are
KINDS = {"deberta_v2": "deberta-v2", "hf_swin": "swin", "hf_resnet": "resnet", "hf_convnext": "convnext"}
IMAGES = {"vit", "dinov2", "swin", "resnet", "convnext", "segformer"}

MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)},
    "BasicUNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "SegResNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "DynUNet": {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3), "strides": (1, 2, 2),
        "upsample_kernel_size": (2, 2),
    },
    "AttentionUnet": {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2),
    },
    "UNETR": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "img_size": 96},
    "SwinUNETR": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "feature_size": 12},
    "DenseNet121": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "ViT": {"spatial_dims": 2, "in_channels": 1, "img_size": 96, "patch_size": 16, "classification": True},
    "VNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
}  # fmt: skip


def from_torchvision(name: str) -> tuple[nn.Module, Inputs]:
    """Any model of torchvision's list; optical flow takes two images."""
    from tests.torchvision_on_cpu import torchvision

    settings: dict[str, Any] = {"weights": None}
    if name.startswith(("deeplab", "fcn", "lraspp")):
        settings["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        settings |= {"init_weights": False}
    extents = next((e for start, e in (VIDEO | CLIPS).items() if name.startswith(start)), (224, 224))
    extents = (299, 299) if name == "inception_v3" else (128, 128) if name.startswith("raft") else extents
    return torchvision.models.get_model(name, **settings), ((1, 3, *extents),) * (2 if name.startswith("raft") else 1)


def from_timm(name: str) -> tuple[nn.Module, Inputs]:
    """Any model of timm's list, at the resolution it was made for."""
    importlib.import_module("tests.torchvision_on_cpu")  # before timm, which imports torchvision
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, ((1, *model.pretrained_cfg["input_size"]),)


def from_transformers(name: str) -> tuple[nn.Module, Inputs]:
    """A small model of an architecture, from its configuration."""
    import transformers

    kind = KINDS.get(name, name)
    settings = {} if kind in OWN_SIZE else WIDE
    config = transformers.AutoConfig.for_model(kind, **settings, use_cache=False)
    tokens = (getattr(config, "vocab_size", 0), 16)
    inputs: Inputs = {"input_ids": tokens}
    if kind in IMAGES:
        inputs = {"pixel_values": (1, 3, 224, 224)}
    elif kind == "wav2vec2":
        inputs = {"input_values": (1, 4000)}
    elif kind == "whisper":
        inputs = {"input_features": (1, config.num_mel_bins, 3000), "decoder_input_ids": tokens}
    elif kind == "t5":
        inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    return transformers.AutoModel.from_config(config), inputs


def from_smp(name: str) -> tuple[nn.Module, Inputs]:
    """A segmentation model over ResNet-18."""
    importlib.import_module("tests.torchvision_on_cpu")  # before smp, which imports torchvision
    import segmentation_models_pytorch as smp

    return getattr(smp, name)(encoder_name="resnet18", encoder_weights=None, classes=2), ((1, 3, 256, 256),)


def from_monai(name: str) -> tuple[nn.Module, Inputs]:
    """A small model in two dimensions."""
    from monai.networks import nets

    return getattr(nets, name)(**MONAI[name]), ((1, 1, 96, 96),)


BUILDERS: dict[str, Callable[[str], tuple[nn.Module, Inputs]]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
    "hf": from_transformers,
    "smp": from_smp,
    "monai": from_monai,
}


def is_shape(leaf: Any) -> bool:
    """Shapes are tuples of numbers; tokens are (how many, length)."""
    return isinstance(leaf, tuple) and all(isinstance(n, int) for n in leaf)


def per_leaf(inputs: Inputs, change: Callable[[tuple[int, ...]], Any]) -> Any:
    """The same structure with every shape replaced."""
    return pytree.tree_map(change, inputs, is_leaf=is_shape)


def drawn(shape: tuple[int, ...]) -> Tensor:
    """A standard normal tensor, or tokens."""
    return torch.randint(shape[0], (1, shape[1])) if is_tokens(shape) else torch.randn(shape)


def is_tokens(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] > 1


def moments(shape: tuple[int, ...]) -> vp.Moments | vp.Tokens:
    """Standard normal values on uniform axes (all but the channels), or tokens of equal probability."""
    if is_tokens(shape):
        return vp.Tokens.uniform(shape[0])
    stored = [n if axis == 1 and len(shape) > 2 else 1 for axis, n in enumerate(shape)]
    return vp.Moments(torch.zeros(stored), torch.ones(stored))


def study(model_name: str, samples: int) -> dict[str, Any]:
    """Everything about one model; what cannot be done is said under `error`."""
    group, _, name = model_name.partition("/")
    torch.manual_seed(0)
    model, inputs = BUILDERS[group](name)
    record: dict[str, Any] = {"model": model_name, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        with torch.no_grad():
            return record | {"status": "done"} | measure(model.eval(), inputs, samples)
    except vp.VarpropError as error:
        return record | {"status": type(error).__name__, "error": str(error).splitlines()[0]}


def measure(model: nn.Module, inputs: Inputs, samples: int) -> dict[str, Any]:
    """Times, counts of operations, and the distance from Monte Carlo."""
    example, given = per_leaf(inputs, drawn), per_leaf(inputs, moments)
    program, capture = timed(lambda: vp.capture(model, example))
    counted = vp.coverage(program, example)
    record: dict[str, Any] = {
        "capture_s": capture,
        "exact": len(counted.exact),
        "approximate": len(counted.approximate),
        "missing": dict(Counter(entry.op for entry in counted.missing)),
    }
    if not counted.complete:
        return record | {"status": "missing"}
    result, seconds = timed(lambda: vp.propagate(program, given))
    errors = layer_errors(model, result, lambda: per_leaf(inputs, drawn), samples)
    worst = max(errors, key=errors.__getitem__, default="")
    return record | {
        "propagate_s": seconds,
        "layers": len(errors),
        "median_error": statistics.median(errors.values()) if errors else None,
        "worst_error": errors.get(worst),
        "worst_layer": worst or "(model)",
        "samples": samples,
    }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the wall time."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def layer_errors(model: nn.Module, result: vp.Result, draw: Callable[[], Any], samples: int) -> dict[str, float]:
    """|std analytic / std Monte Carlo - 1| of every module called once, both as root mean squares over its units."""
    sums: dict[str, list[Tensor]] = {}
    paths = [path for path, calls in result.calls.items() if len(calls) == 1]
    modules = dict(model.named_modules())
    hooks = [modules[path].register_forward_hook(recorder(sums, path, result[path])) for path in paths]
    for _ in range(samples):
        example = draw()
        model(**example) if isinstance(example, dict) else model(*example)
    for hook in hooks:
        hook.remove()
    errors = {path: ratio_error(result[path], *sums[path]) for path in paths if path in sums}
    return {path: error for path, error in errors.items() if error is not None}


def recorder(sums: dict[str, list[Tensor]], path: str, found: vp.Moments) -> Callable[..., None]:
    """Adds up values and squares of a module's output, over the uniform axes too; other outputs are left out."""
    pooled = [axis for axis, stored in enumerate(found.shape) if stored == 1]

    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        value = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if value is None or value.shape != found.full or not value.is_floating_point():
            return
        wide = value.double()
        count = torch.tensor(wide.numel() / max(1, found.mean.numel()), dtype=torch.float64)
        parts = [count, wide.sum(pooled, keepdim=True), wide.square().sum(pooled, keepdim=True)] if pooled else [
            count, wide, wide.square()
        ]  # fmt: skip
        sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts

    return record


def ratio_error(found: vp.Moments, count: Tensor, total: Tensor, squares: Tensor) -> float | None:
    """The relative error of the std, or None where nothing varies or there are too few values to tell."""
    if count < 2:
        return None
    measured = ((squares - total.square() / count) / (count - 1)).clamp_min(0).mean()
    return abs(float((found.var.double().mean() / measured).sqrt() - 1)) if measured > 1e-12 else None


def run(model_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """`study` in a process of its own: a crash or a hang of one model is its result, not the end of the sweep."""
    command = [sys.executable, __file__, "--one", model_name, "--samples", str(options.samples)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"model": model_name, "status": "too long", "error": f"not finished within {options.limit} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        return {"model": model_name, "status": "crash", "error": last[:300]}
    return json.loads(lines[-1]) | {"total_s": time.perf_counter() - start}


def table(records: list[dict[str, Any]]) -> str:
    """One line a model, in markdown."""
    head = ["model", "exact", "approximate", "missing", "capture s", "propagate s", "layers", "median", "worst"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for record in sorted(records, key=lambda r: str(r["model"])):
        missing = ", ".join(f"{op} x{n}" for op, n in record.get("missing", {}).items())
        said = record.get("error", "") if "exact" not in record else missing
        cells = [record["model"], record.get("exact", ""), record.get("approximate", ""), said]
        cells += [number(record.get(key), ".2f") for key in ("capture_s", "propagate_s")]
        cells += [record.get("layers", ""), number(record.get("median_error"), ".1%")]
        cells += [f"{number(record.get('worst_error'), '.1%')} {record.get('worst_layer', '')}"]
        lines.append("| " + " | ".join(str(cell).replace("|", "/").strip() for cell in cells) + " |")
    complete = sum(record["status"] == "done" for record in records)
    return "\n".join([f"{complete} of {len(records)} models propagate without sampling.", "", *lines, ""])


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def present(names: list[str]) -> list[str]:
    """The models whose package is installed; for every other group one sentence."""
    groups = dict.fromkeys(name.partition("/")[0] for name in names)
    kept = {g for g in groups if g in PACKAGES and importlib.util.find_spec(PACKAGES[g]) is not None}
    for group in groups:
        if group not in kept:
            why = f"{PACKAGES[group]} is not installed" if group in PACKAGES else "there is no builder for it here"
            print(f"{group}: left out, {why}.", flush=True)
    return [name for name in names if name.partition("/")[0] in kept]


def main() -> None:
    """Sweep, or (--one) study one model and print its record as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--list", type=Path, help="a file with a model a line")
    parser.add_argument("--out", type=Path, default=Path("zoo-results"))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a model")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(study(options.one, options.samples)))
        return
    sweep(options)


def sweep(options: argparse.Namespace) -> None:
    """Every model in turn, each written down as soon as it is done."""
    named = options.list.read_text().split() if options.list else []
    names = [*options.models, *named] or [f"torchvision/{name}" for name in FEW]
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / "zoo.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    records = {record["model"]: record for record in map(json.loads, lines)}
    for name in present(names):
        if name in records and not options.again:
            continue
        records[name] = run(name, options)
        with journal.open("a") as file:
            file.write(json.dumps(records[name]) + "\n")
        print(summary(records[name]), flush=True)
    (options.out / "zoo.md").write_text(table(list(records.values())))
    print(f"{options.out / 'zoo.md'}: {table(list(records.values())).splitlines()[0]}")


def summary(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    said = record.get("error") or f"{record.get('exact')} exact, {record.get('approximate')} approximate"
    missing, median = record.get("missing"), record.get("median_error")
    said += f", missing {missing}" if missing else f", median error {median:.1%}" if median is not None else ""
    return f"{record['model']:<44} {record['status']:<8} {said}"


if __name__ == "__main__":
    main()
