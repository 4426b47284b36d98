"""Pages of the site that follow from the code, written when it is built: commands, rules, activations, llms.txt, ...

A Sphinx extension. The pages lie in docs/reference and are not committed.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp
from varprop.cli.main import make_parser
from varprop.engine import reasons
from varprop.engine.plan import make_plan
from varprop.gaussian.stability import chi, correlation, scale_rate, stable_shift, start_for
from varprop.norm.api import captured_for
from varprop.norm.initialization import activated_with_slope, layers_before_activations
from varprop.norm.modes import with_calls
from varprop.rules.registry import Key, Rule, registered

SUMMARY = "Mean and variance of every unit of a PyTorch model, computed from its weights instead of measured on data."
WRITTEN = "This page is written from {} when the site is built."


def setup(app: Any) -> dict[str, bool]:
    """Write the pages before Sphinx looks for sources, and llms.txt when all is built."""
    app.connect("config-inited", lambda app, config: write_pages(Path(app.srcdir) / "reference"))
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True}


def write_pages(folder: Path) -> None:
    """Write every generated page into a folder; one that is as it should be is left alone, for quick rebuilds."""
    folder.mkdir(exist_ok=True)
    pages = {
        "commands": commands_page(),
        "rules": rules_page(),
        "limitations": limitations_page(),
        "activations": activations_page(),
    }
    for name, text in pages.items():
        file = folder / f"{name}.md"
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")


# --- the command line ---


def commands_page() -> str:
    """Every command with its usage and options, from the parsers themselves."""
    lines = ["# Command line", "", "The commands of `varprop` with all their arguments.", ""]
    lines += ["`varprop COMMAND --help` prints the same. `python -m varprop` is `varprop`."]
    lines += [WRITTEN.format("the parsers of the commands"), ""]
    for parser in parsers(make_parser()):
        lines += [f"## {parser.prog}", "", escaped(parser.description or ""), ""]
        lines += ["```text", parser.format_usage().strip(), "```", ""]
        rows = [row for action in parser._actions if (row := option_row(parser, action))]
        lines += [*table(("argument", "default", "what it does"), rows), ""] if rows else []
    return "\n".join(lines)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands; groups of commands have no page of their own."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    commands = [command for group in groups for command in group.choices.values()]
    if not commands or parser.prog == "varprop":
        yield parser
    for command in commands:
        yield from parsers(command)


def option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str] | None:
    """Names, default and help of an argument; None for one that is not shown."""
    if action.help is argparse.SUPPRESS or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return None
    value = "" if action.nargs == 0 else f" {parser._get_formatter()._format_args(action, _metavar(action))}"
    value = value.replace("|", r"\|")  # which would end a cell of the table
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{value.strip()}`"
    unset = action.default in (None, False, True, argparse.SUPPRESS, float("inf"), []) or not action.option_strings
    return names, "" if unset else f"`{action.default}`", escaped(action.help or "")


def _metavar(action: argparse.Action) -> str:
    if action.option_strings:
        return action.dest.upper().replace("_", "-")
    return action.dest


# --- rules and limitations ---

FAMILIES = {
    "linear": "Linear layers and convolutions",
    "elementwise": "Functions of single elements, activations among them",
    "gelu": "Functions of single elements, activations among them",
    "arithmetic": "Sums and products",
    "norm": "Normalizations",
    "attention": "Softmax and attention",
    "recurrent": "Recurrent layers",
    "dropout": "Dropout",
    "pooling": "Pooling and resampling",
    "reduction": "Sums, means and ranks over axes",
    "matrices": "Products of matrices and distances",
    "losses": "Losses",
    "structural": "Operations that move elements",
}
KINDS = {
    "structural": "moves elements: mean and variance alike",
    "elementwise": "integrated by quadrature",
    "source": "draws random numbers",
    "constant": "does not depend on the values",
}


def rules_page() -> str:
    """Every operation with a rule, what the rule computes, and how exact it is."""
    families: dict[str, dict[tuple[str, str], list[str]]] = {title: {} for title in FAMILIES.values()}
    families["Other operations"] = {}
    for key, rule in registered().items():
        row = described(rule), exactness(rule)
        families[family(rule)].setdefault(row, []).append(name_of(key))
    lines = ["# Operations and how exact they are", ""]
    lines += [
        f"The {len(registered())} operations with a rule, what it computes, and how exact that is.",
        "",
        "*Exact* means exact up to rounding, if the elements of the input are independent and, for functions that are "
        "not linear, Gaussian. `vp.coverage(model, example)` says the same of your model; "
        "[limitations](limitations.md) lists what can make a result approximate. "
        + WRITTEN.format("the registry of rules"),
        "",
    ]
    for title, rows in families.items():
        if rows:
            cells = [(", ".join(f"`{name}`" for name in sorted(names)), *row) for row, names in rows.items()]
            lines += [f"## {title}", "", *table(("operations", "moments", "exactness"), sorted(cells)), ""]
    return "\n".join(lines)


def family(rule: Rule) -> str:
    """The heading that a rule stands under: that of the file it is defined in."""
    functions = (getattr(function, "func", function) for function in (rule.function, rule.approximate, rule.evaluate))
    modules = [getattr(function, "__module__", "") for function in functions if function is not None]
    for module in modules:
        package, _, name = str(module).rpartition(".")
        if package == "varprop.rules" and name in FAMILIES:
            return FAMILIES[name]
    return FAMILIES.get(rule.kind, "Other operations")


def name_of(key: Key) -> str:
    """An operation as users know it."""
    if isinstance(key, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(key).removeprefix("aten.").removesuffix(".default")
    return getattr(key, "__name__", str(key))


def described(rule: Rule) -> str:
    """What a rule computes, in the first sentence of its docstring."""
    function = getattr(rule.function, "func", rule.function)  # of a partial
    text = inspect.getdoc(function) if inspect.isfunction(function) else None
    if text and rule.kind == "rule":
        return escaped(text.split("\n\n")[0])
    if rule.kind == "elementwise" and rule.affine is not None:
        return "a line: means and variances follow directly"
    return "closed form" if rule.kind == "elementwise" and rule.function is not None else KINDS.get(rule.kind, "")


def exactness(rule: Rule) -> str:
    """`exact`, or a link to the reasons why not."""
    if rule.approximate is None:
        return "exact"
    said = "approximate" if isinstance(rule.approximate, str) else "approximate for some arguments"
    return f"[{said}](limitations.md#of-single-operations)"


def sentences(function: Callable[..., Any], seen: frozenset[Any] = frozenset()) -> set[str]:
    """The texts that a function may return: those in it, in the constants it reads, and in functions that it calls."""
    code = getattr(function, "__code__", None)
    if code is None or function in seen:
        return set()
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    read = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    values = [*code.co_consts, *(const for code in inner for const in code.co_consts), *cells, *read]
    documentation = {function.__doc__}
    texts = {v for v in values if isinstance(v, str) and v.count(" ") > 3 and v not in documentation}
    called = [v for v in values if inspect.isfunction(v) and v.__module__.startswith("varprop.rules")]
    return texts.union(*(sentences(v, seen | {function}) for v in called))


def limitations_page() -> str:
    """Everything that can make a propagated result approximate, with the operations it concerns."""
    lines = ["# Limitations", "", "What can make a propagated mean or variance approximate.", ""]
    lines += [
        "A result is marked `approximate` wherever one of these holds; `vp.coverage`, `vp.propagate` and `vp.inspect` "
        "name the reason with operation and source line. No mark can tell how well the two assumptions hold: see "
        "[what is exact, and when it is not](../exact.md). " + WRITTEN.format("the registry of rules and the engine"),
        "",
        "## Whatever the operation",
        "",
    ]
    lines += [f"- {escaped(text)}." for name, text in vars(reasons).items() if name.isupper() and isinstance(text, str)]
    by_reason: dict[str, list[str]] = {}
    for key, rule in registered().items():
        said = rule.approximate
        for text in [said] if isinstance(said, str) else sorted(sentences(said)) if said else []:
            by_reason.setdefault(text, []).append(name_of(key))
    rows = [(escaped(text), ", ".join(f"`{name}`" for name in sorted(names))) for text, names in by_reason.items()]
    lines += ["", "## Of single operations", "", *table(("why", "operations"), rows), ""]
    partial = sorted(name_of(key) for key, rule in registered().items() if rule.handles is not None)
    lines += [
        "## Operations with a rule for some arguments only",
        "",
        'With others they count as missing: `vp.MissingRule` names them, and `on_missing="sample"` estimates them.',
        "",
        ", ".join(f"`{name}`" for name in partial) + ".",
        "",
    ]
    return "\n".join(lines)


# --- activations ---

DEPTHS = 10, 100  # of the chains for which a start is shown


def activations_page() -> str:
    """What every activation of torch.nn with a rule does to scales, gradients and correlations behind a layer."""
    lines = ["# Activations in deep chains", ""]
    lines += [
        "What an activation behind layers of unit variance does to a signal, its gradients and its correlations.",
        "",
        "The units before the activation are b + σ Z. *v* is the variance behind it. *λ* is the share of a small error "
        "of scale that remains behind the next layer. *χ* is the factor of squared gradients on the way back through "
        "that layer, which subtracts means. *c(.5)* and *c(.99)* are the correlations behind the activation of two "
        "samples with correlation .5 and .99 before it; χ is the slope of c at 1.",
        "",
        "The first columns have b = 0 and σ = 1, the next the first shift, and the last the shift and deviation with "
        "which `vp.init_` starts chains of that depth. There λ ≤ 1, and χ to the power of the depth is at most 1.5, or "
        "e with a kink at 0, as far as that is possible. The slope of a jump counts as 0. "
        "[What follows from it](../initialization.md). "
        + WRITTEN.format("the moments that the registered rules compute"),
        "",
    ]
    header = "activation", "mean", "v", "λ", "χ", "c(.5)", "c(.99)", "first shift: b", "v", "λ", "χ"
    by_depth = tuple(f"depth {depth}: {what}" for depth in DEPTHS for what in ("b", "σ", "λ"))
    rows = [row for kind in activation_classes() if (row := activation_row(kind))]
    return "\n".join([*lines, *table((*header, *by_depth), rows), ""])


def activation_classes() -> list[type[nn.Module]]:
    """The activations of torch.nn that need no arguments and act on every element by itself."""
    names = (name for name in nn.modules.activation.__all__ if "oftmax" not in name and "oftmin" not in name)
    kinds = [getattr(nn, name) for name in names]
    return [kind for kind in kinds if _is_elementwise(kind)]


def _is_elementwise(kind: type[nn.Module]) -> bool:
    x = torch.tensor([[-1.5, 0.5], [0.3, 2.0]])
    try:
        module = kind().eval()
        pieces = torch.cat([module(x[:, :1]), module(x[:, 1:])], 1)
        return torch.allclose(module(x), pieces) and bool(pieces.std() > 0)  # vector instructions round otherwise
    except (TypeError, RuntimeError, IndexError, ValueError):
        return False  # it needs arguments, or several elements


@torch.no_grad()
def activation_row(kind: type[nn.Module]) -> tuple[str, ...] | None:
    """A line of the table; None for an activation that the engine has no function of one variable for."""
    model = nn.Sequential(nn.Linear(1, 1), kind(), nn.Linear(1, 1)).eval()
    captured = captured_for(model, vp.Moments(0.0, 1.0), (1, 1))
    graph = with_calls(captured.programs[False], {"0": model[0], "2": model[2]}, captured.moments)
    plan = make_plan(graph.program, graph.random_inputs)
    found = [activation for _, activation in layers_before_activations(graph, plan) if activation is not None]
    if not found:
        return None
    moments = functools.partial(activated_with_slope, found[0])

    def at(shift: float, std: float = 1.0) -> tuple[float, float, float, float]:
        b, s = (torch.tensor([x], dtype=torch.float64) for x in (shift, std))
        mean, var, _ = moments(b, s)
        return float(mean), float(var), float(scale_rate(moments, b, s)), float(chi(moments, b, s))

    stable = stable_shift(lambda mean, std: moments(mean, std)[:2])
    cells = [*at(0.0), *(correlation(moments, c) for c in (0.5, 0.99)), stable, *at(stable)[1:]]
    for depth in DEPTHS:
        shift, std = start_for(moments, stable, depth)
        cells += [shift, std, at(shift, std)[2]]
    return f"`{kind.__name__}`", *(f"{cell:.3f}" for cell in cells)


# --- text ---


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def escaped(text: str) -> str:
    """Text on one line in which no character means anything to Markdown, but for code in single backticks."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    return "".join(
        p.replace("|", r"\|") if p.startswith("`") else re.sub(r"([|*_$<>\[\]\\])", r"\\\1", p) for p in pieces
    )


# --- llms.txt ---


def write_index(app: Any, exception: Exception | None) -> None:
    """Write llms.txt, the pages of the site with one sentence each, beside the pages."""
    if exception is not None or app.builder.format != "html":
        return
    lines = ["# varprop", "", f"> {SUMMARY}", "", "## Pages", ""]
    for name in ordered(app.env.toctree_includes, app.config.root_doc):
        title = app.env.titles[name].astext()
        sentence = first_sentence(app.env.get_doctree(name))
        lines.append(f"- [{title}]({app.builder.get_target_uri(name)}){f': {sentence}' if sentence else ''}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def ordered(includes: dict[str, list[str]], name: str) -> list[str]:
    """A page and those below it, in the order of the tables of contents."""
    return list(dict.fromkeys([name, *(page for child in includes.get(name, ()) for page in ordered(includes, child))]))


def first_sentence(document: Any) -> str:
    """The first sentence of the first paragraph of a document as docutils reads it."""
    from docutils import nodes  # comes with Sphinx; the pages above do without

    paragraph = next((p for p in document.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.?!])\s(?=[A-Z`])", text, maxsplit=1)[0].removesuffix(":")
