"""Imports point one way: read from the sources, so that no import has to succeed for it."""

import ast
import graphlib
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "varprop"

# A module imports from its own layer or one above it in this list, never from below.
LAYERS = [
    {"errors", "gaussian", "leaf", "moments", "node", "ops", "restore"},
    {"patterns"},
    {"capture", "data", "lr", "lr_objective", "registry", "sampling"},
    {"outputs", "plan", "rules"},
    {"clusters"},
    {"branches"},
    {"walk"},
    {"report"},
    {"engine"},
    {"norm"},
    {"convert"},
    {"inspection"},
]
LAYER_OF = {name: rank for rank, names in enumerate(LAYERS) for name in names}
KNOW_NO_RULES = {"capture", "patterns"}
RULES_AND_ABOVE = {"rules", "plan", "clusters", "walk", "report", "engine", "norm", "convert"}

# These stand outside and see varprop as any user does.
OUTSIDE = {"lab", "cli"}

# What the core may import inside a function, with an error that names the extra; at the top only torch.
OPTIONAL = {"jinja2", "matplotlib", "numpy", "pandas", "rich", "scipy", "triton"}
# Kernels cannot be written without Triton; the package is imported inside functions only.
KERNELS = Path("norm/kernels")


@dataclass(frozen=True)
class Import:
    """One imported module: where, which, and whether it is executed when the file is."""

    file: Path
    line: int
    module: str
    names: tuple[str, ...]
    at_top: bool

    def __str__(self):
        return f"{self.file}:{self.line} imports {self.module}"

    @property
    def inside(self):
        return self.module.split(".")[0] == "varprop"

    @property
    def part(self):
        """The part of varprop imported, `moments` of `varprop.moments`; empty for the package itself."""
        return [*self.module.split("."), ""][1]


def part_of(file, root):
    first = file.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imports_of(file, root):
    package = ("varprop", *file.relative_to(root).parent.parts)
    for node, at_top in walk_imports(ast.parse(file.read_text("utf-8")), at_top=True):
        for module, names in modules_of(node, package, root):
            yield Import(file.relative_to(root), node.lineno, module, names, at_top)


def walk_imports(node, at_top):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_top
        deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_type_checking(child)
        yield from walk_imports(child, at_top and not deferred)


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def modules_of(node, package, root):
    if isinstance(node, ast.Import):
        return [(alias.name, ()) for alias in node.names]
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join([*base, *([node.module] if node.module else [])])
    names = tuple(alias.name for alias in node.names)
    if module != "varprop":
        return [(module, names)]
    # `from varprop import x` means the module x where there is one, the package's own name x otherwise.
    return [(f"varprop.{name}", ()) if is_module(name, root) else ("varprop", (name,)) for name in names]


def is_module(name, root):
    return (root / f"{name}.py").exists() or (root / name).is_dir()


def files_of(root):
    return sorted(root.rglob("*.py"))


def core_imports(root):
    files = [f for f in files_of(root) if part_of(f, root) not in OUTSIDE and f != root / "__init__.py"]
    return [found for file in files for found in imports_of(file, root)]


def third_party_violations(root):
    at_top = sys.stdlib_module_names | {"torch", "varprop"}
    facade = list(imports_of(root / "__init__.py", root)) if (root / "__init__.py").exists() else []
    for found in [*core_imports(root), *facade]:
        name = found.module.split(".")[0]
        if name == "triton" and found.file.is_relative_to(KERNELS):
            continue
        if name not in at_top and (found.at_top or name not in OPTIONAL):
            where = "at the top" if found.at_top else "inside a function"
            yield f"{found} {where}; the core imports only torch, and {sorted(OPTIONAL)} inside functions"


def kernel_violations(root):
    for found in core_imports(root):
        inside = found.file.is_relative_to(KERNELS)
        if (
            not inside
            and found.at_top
            and (found.module.startswith("varprop.norm.kernels") or "kernels" in found.names)
        ):
            yield f"{found} at the top; without Triton that fails"


def root_violations(root):
    for found in core_imports(root):
        if found.inside and not found.part:
            yield f"{found} itself; import the module that defines the name"


def layer_violations(root):
    for found in core_imports(root):
        importer = part_of(root / found.file, root)
        if not found.inside or not found.part or importer == found.part:
            continue
        if importer in KNOW_NO_RULES and found.part in RULES_AND_ABOVE:
            yield f"{found}; {importer} knows no rules"
        elif LAYER_OF.get(found.part, len(LAYERS)) > LAYER_OF.get(importer, len(LAYERS)):
            yield f"{found}, which stands on {importer}"


def homeless_modules(root):
    parts = {part_of(file, root) for file in files_of(root)} - {"__init__"} - OUTSIDE
    return sorted(parts - LAYER_OF.keys())


def cycle(root):
    graph = defaultdict(set)
    for found in core_imports(root):
        importer = part_of(root / found.file, root)
        if found.inside and found.part and importer != found.part:
            graph[importer].add(found.part)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def public_names(root):
    for node in ast.parse((root / "__init__.py").read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))
    return set()


def outside_violations(root):
    public = public_names(root)
    for file in files_of(root):
        if part_of(file, root) in OUTSIDE:
            for found in imports_of(file, root):
                yield from hidden_import(found, public)
            yield from hidden_attributes(file, root, public)


def hidden_import(found, public):
    if found.inside and found.part and found.part not in OUTSIDE:
        yield f"{found}; use `import varprop as vp`"
    for name in found.names:
        if found.module == "varprop" and name not in public:
            yield f"{found.file}:{found.line} imports {name}, which is not public"


def hidden_attributes(file, root, public):
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if is_attribute_of_varprop(node) and node.attr not in public | OUTSIDE:
            yield f"{file.relative_to(root)}:{node.lineno} uses vp.{node.attr}, which is not public"


def is_attribute_of_varprop(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("vp", "varprop")


CHECKS = [third_party_violations, kernel_violations, root_violations, layer_violations, outside_violations]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.replace("_violations", ""))
def test_imports_point_one_way(check):
    violations = list(check(SOURCE))
    assert not violations, "\n".join(violations)


def test_no_import_goes_round_in_a_circle():
    assert cycle(SOURCE) is None


def test_every_module_has_a_layer():
    assert homeless_modules(SOURCE) == [], "give the new modules a place in LAYERS"


def test_importing_varprop_imports_no_extra():
    """Nor torch's compiler, which takes a second and brings triton where it is installed."""
    extras = "{'scipy', 'matplotlib', 'rich', 'jinja2', 'triton', 'torchvision', 'torch._dynamo'}"
    script = f"import sys, varprop; print(*(sys.modules.keys() & {extras}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


# --- the checks themselves, on small trees ---

BAD_TREES = {
    "numpy at the top": (third_party_violations, {"walk.py": "import numpy as np"}),
    "unlisted package in a function": (third_party_violations, {"walk.py": "def f():\n    import requests"}),
    "extra at the top of a class": (third_party_violations, {"walk.py": "class A:\n    import scipy.stats"}),
    "extra behind try": (
        third_party_violations,
        {"walk.py": "try:\n    import rich\nexcept ImportError:\n    pass"},
    ),
    "extra in the facade": (third_party_violations, {"__init__.py": "import matplotlib"}),
    "kernels at the top": (kernel_violations, {"norm/backends.py": "from . import kernels"}),
    "triton outside the kernels": (third_party_violations, {"norm/layers.py": "import triton"}),
    "root": (root_violations, {"walk.py": "import varprop"}),
    "name from root": (root_violations, {"rules/linear.py": "from varprop import propagate"}),
    "relative name from root": (root_violations, {"rules/linear.py": "from .. import propagate"}),
    "upwards": (layer_violations, {"registry.py": "from .rules import linear"}),
    "upwards lazily": (layer_violations, {"moments.py": "def f():\n    from varprop.walk import walk"}),
    "upwards from a package": (
        layer_violations,
        {"gaussian/normal.py": "from ..walk import walk"},
    ),
    "upwards as a module": (layer_violations, {"registry.py": "from . import walk", "walk.py": ""}),
    "rules in capture": (layer_violations, {"capture.py": "from .rules.linear import linear"}),
    "rules in patterns": (layer_violations, {"patterns.py": "from .rules import linear"}),
    "inside of the core": (outside_violations, {"lab/train.py": "from varprop.walk import walk"}),
    "hidden name": (outside_violations, {"lab/train.py": "from varprop import walk_nodes"}),
    "hidden attribute": (outside_violations, {"cli/main.py": "import varprop as vp\nvp._secret()"}),
}


def grown(tree, root):
    for name, text in {"__init__.py": "__all__ = ['propagate']", **tree}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("check", "tree"), BAD_TREES.values(), ids=BAD_TREES.keys())
def test_each_check_catches_its_violation(check, tree, tmp_path):
    assert len(list(check(grown(tree, tmp_path)))) == 1


def test_what_is_allowed_passes(tmp_path):
    tree = {
        "moments.py": "import torch\nimport math\nfrom .gaussian.normal import x",
        "gaussian/normal.py": "from . import quadrature",
        "gaussian/quadrature.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
        "walk.py": "from . import moments\nfrom varprop.rules import linear\nfrom .capture import p",
        "rules/linear.py": "from ..registry import rule\nfrom ..moments import Moments",
        "registry.py": "from torch import Tensor",
        "capture.py": "from .registry import kept",
        "lr.py": "def f():\n    from scipy.optimize import minimize_scalar",
        "lab/train.py": "import numpy\nimport varprop as vp\nfrom .data import x\nvp.propagate",
        "cli/main.py": "import typer\nfrom varprop import propagate\nfrom varprop.lab import train",
    }
    root = grown(tree, tmp_path)
    assert [violation for check in CHECKS for violation in check(root)] == []
    assert cycle(root) is None
    assert homeless_modules(root) == []


def test_circles_and_homeless_modules_are_found(tmp_path):
    circle = {"errors.py": "from .moments import x", "moments.py": "from .errors import y"}
    root = grown({**circle, "new.py": ""}, tmp_path)
    assert set(cycle(root)) == {"errors", "moments"}
    assert homeless_modules(root) == ["new"]
