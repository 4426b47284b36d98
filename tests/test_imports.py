"""Imports point one way: read from the sources, so that no import has to succeed for it."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = ("varprop", "varprop_lab")

# A part of varprop imports from itself and from those before it in this list (docs/architecture.md says why).
ORDER = [
    "version",
    "errors",
    "text_table",
    "pages",
    "gaussian",
    "moments",
    "graph",
    "rules",
    "engine",
    "training",
    "predict",
    "norm",
    "convert",
    "inspection",
    "opacus",
]

# These stand outside and see varprop as any user does; the lab extends the command line, which does not know it.
OUTSIDE = ["callbacks", "cli", "__main__", "varprop_lab"]

# What the core and those outside both use, and users have no need of.
SHARED = ["text_table", "pages"]

# What the core may import inside a function, with an error that names the extra; at the top only torch.
OPTIONAL = {"jinja2", "matplotlib", "numpy", "pandas", "rich", "scipy", "triton"}
# Kernels cannot be written without Triton; the package is imported inside functions only.
KERNELS = Path("varprop/norm/backends/triton")
# The extra of that name: a class of Opacus is what it extends, and nothing else imports it.
OPACUS = Path("varprop/opacus.py")
FACADE = Path("varprop/__init__.py")

TESTS = Path(__file__).parent
# What users import: tests go through these wherever what they check can be seen from there.
PUBLIC = ["varprop", "varprop.callbacks", "varprop.opacus", "varprop.predict.posteriors", "varprop.cli.main"]
# Modules behind them that tests import all the same, and why. A module that is not listed may move without a test
# being touched; before one is added, see whether its check can be made of a model and its results.
SEAMS = {
    "the packages' own names": ["norm"],
    "mathematics without models, held against closed forms, integrals and draws": [
        "gaussian.activations",
        "gaussian.bivariate",
        "gaussian.derivatives",
        "gaussian.gelu",
        "gaussian.maximum",
        "gaussian.normal",
        "gaussian.quadrature",
        "gaussian.rectifier",
        "gaussian.shortcuts",
        "gaussian.softmax",
        "gaussian.stability",
    ],
    "a rule is looked up, and run on one operation that no model is made for": [
        "rules.registry",
        "engine.evaluation",
        "engine.plan",
        "graph.node",
        "graph.ops",
    ],
    "a limit of size is lowered, so that a small model reaches it": [
        "engine.clusters",
        "inspection.measure",
        "inspection.run",
        "norm.distributed",
        "predict.api",
        "rules.linear",
        "cli.inspect",
    ],
    "limits and errors that are stated once, and that tables and pages repeat": [
        "norm.fold.layout",
        "predict.reliability",
        "rules.recurrent",
    ],
    "the definition of the fold, and those who compute it, agree": [
        "norm.backends.torch",
        "norm.backends.triton",
        "norm.fold.compiled",
        "norm.fold.cuda_replay",
        "norm.fold.dispatch",
        "norm.fold.reference",
        "norm.lowering",
        "norm.network",
        "norm.statistics",
        "predict.cuda_replay",
    ],
    "a part of a pipeline has cases that no model shows one by one": [
        "graph.capture",
        "graph.functional",
        "graph.program",
        "graph.tracing",
        "norm.api",
        "norm.batchnorm",
        "norm.initialization",
        "norm.linear_layers",
        "norm.modes",
        "norm.recurrent",
        "norm.shared_inputs",
        "predict.curves",
        "predict.noise",
        "predict.samples",
    ],
    "how numbers, findings and progress are written": [
        "cli.progress",
        "inspection.findings",
        "inspection.page",
        "text_table",
    ],
}
# Kernels are tested one by one; their tests need Triton or a GPU.
OF_KERNELS = "varprop.norm.backends.triton."


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
        return self.module.split(".")[0] in PACKAGES

    @property
    def part(self):
        """The part imported, `moments` of `varprop.moments`, or `varprop_lab`; empty for varprop itself."""
        package, *path = self.module.split(".")
        return package if package != "varprop" else [*path, ""][0]


def part_of(file, root):
    package, path = file.relative_to(root).parts[:2]
    return package if package != "varprop" else path.removesuffix(".py")


@functools.cache  # no test changes a file that is there
def parsed(file):
    return ast.parse(file.read_text("utf-8"))


@functools.cache
def imports_of(file, root):
    package = file.relative_to(root).parent.parts
    return [
        Import(file.relative_to(root), node.lineno, module, names, at_top)
        for node, at_top in walk_imports(parsed(file), at_top=True)
        for module, names in modules_of(node, package, root)
    ]


def walk_imports(node, at_top):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_top
        elif not isinstance(child, ast.expr):  # in which there are no statements
            deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(child)
            yield from walk_imports(child, at_top and not deferred)


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
        "_typing.TYPE_CHECKING",
    )


def modules_of(node, package, root):
    """Modules with the names taken from them; `from package import module` counts as an import of the module."""
    if isinstance(node, ast.Import):
        return [(alias.name, ()) for alias in node.names]
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join([*base, *([node.module] if node.module else [])])
    names = [alias.name for alias in node.names]
    submodules = [name for name in names if is_module(f"{module}.{name}", root)]
    own = tuple(name for name in names if name not in submodules)
    return [(f"{module}.{name}", ()) for name in submodules] + ([(module, own)] if own else [])


def is_module(name, root):
    return name.split(".")[0] in PACKAGES and "." in name and file_of(name, root) is not None


def file_of(module, root):
    path = root.joinpath(*module.split("."))
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return found[0] if found else (path if path.is_dir() else None)


def files_of(root):
    return sorted(root.rglob("*.py"))


def core_imports(root):
    files = [f for f in files_of(root) if part_of(f, root) not in OUTSIDE and f != root / FACADE]
    return [found for file in files for found in imports_of(file, root)]


def third_party_violations(root):
    at_top = sys.stdlib_module_names | {"torch", "varprop"}
    facade = imports_of(root / FACADE, root)
    for found in [*core_imports(root), *facade]:
        name = found.module.split(".")[0]
        if (name == "triton" and found.file.is_relative_to(KERNELS)) or (name == "opacus" and found.file == OPACUS):
            continue
        if name not in at_top and (found.at_top or name not in OPTIONAL):
            where = "at the top" if found.at_top else "inside a function"
            yield f"{found} {where}; the core imports only torch, and {sorted(OPTIONAL)} inside functions"


def kernel_violations(root):
    package = ".".join(KERNELS.parts)
    for found in core_imports(root):
        if not found.file.is_relative_to(KERNELS) and found.at_top and found.module.startswith(package):
            yield f"{found} at the top; without Triton that fails"


def root_violations(root):
    for found in core_imports(root):
        if found.inside and not found.part:
            yield f"{found} itself; import the module that defines the name"


def order_violations(root):
    rank = {name: place for place, name in enumerate([*ORDER, *OUTSIDE])}
    files = [file for file in files_of(root) if file != root / FACADE]
    for found in (found for file in files for found in imports_of(file, root)):
        importer = part_of(root / found.file, root)
        if found.inside and found.part and rank.get(found.part, 0) > rank.get(importer, 0):
            yield f"{found}, which stands on {importer}"


def homeless_parts(root):
    return sorted({part_of(file, root) for file in files_of(root)} - {"__init__", *ORDER, *OUTSIDE})


def cycle(root):
    """A circle of files, whoever imports, and also where the import is for type checkers or inside a function.

    The one exception: the facade names, for type checkers, parts outside that it imports when they are asked for.
    """
    graph = defaultdict(set)
    for file in files_of(root):
        for found in imports_of(file, root):
            target = file_of(found.module, root) if found.inside else None
            asked_for = file == root / FACADE and not found.at_top and found.part in OUTSIDE
            if target is not None and target != file and not asked_for:
                graph[str(file.relative_to(root))].add(str(target.relative_to(root)))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def public_names(root):
    for node in parsed(root / FACADE).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))
    return set()


def outside_violations(root):
    public = public_names(root) | {"__version__"}
    for file in files_of(root):
        if part_of(file, root) in OUTSIDE:
            for found in imports_of(file, root):
                yield from hidden_import(found, public)
            yield from hidden_attributes(file, root, public)


def hidden_import(found, public):
    if found.inside and found.part and found.part not in [*OUTSIDE, *SHARED]:
        yield f"{found}; use `import varprop as vp`"
    for name in found.names:
        if found.module == "varprop" and name not in public:
            yield f"{found.file}:{found.line} imports {name}, which is not public"


def hidden_attributes(file, root, public):
    for node in ast.walk(parsed(file)):
        if is_attribute_of_varprop(node) and node.attr not in public | set(OUTSIDE):
            yield f"{file.relative_to(root)}:{node.lineno} uses vp.{node.attr}, which is not public"


def is_attribute_of_varprop(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("vp", "varprop")


CHECKS = [third_party_violations, kernel_violations, root_violations, order_violations, outside_violations]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.replace("_violations", ""))
def test_imports_point_one_way(check):
    violations = list(check(SOURCE))
    assert not violations, "\n".join(violations)


def test_no_file_imports_itself_by_way_of_others():
    assert cycle(SOURCE) is None


def test_every_part_has_its_place():
    assert homeless_parts(SOURCE) == [], "give the new parts a place in ORDER"


def modules_that_tests_name():
    """By module of varprop, the files in tests that import it, or name something in it to be replaced."""
    found = defaultdict(set)
    for file in files_of(TESTS):
        for node in ast.walk(parsed(file)):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                names = [module for module, _ in modules_of(node, (), SOURCE)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "import_module")):
                names = [module_in(node.args[0])] if node.args else []
            else:
                continue
            for name in names:
                if name.split(".")[0] == "varprop":
                    found[name].add(str(file.relative_to(TESTS)))
    return found


def module_in(argument):
    """The longest beginning of "varprop.part.module.Class.name" that is a module."""
    words = argument.value.split(".") if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []
    while len(words) > 1 and not is_module(".".join(words), SOURCE):
        words.pop()
    return ".".join(words)


def test_tests_import_what_is_public_and_few_modules_behind_it():
    listed = {*PUBLIC, *(f"varprop.{name}" for names in SEAMS.values() for name in names)}
    found = {name: files for name, files in modules_that_tests_name().items() if not name.startswith(OF_KERNELS)}
    assert {name: sorted(files) for name, files in found.items() if name not in listed} == {}
    assert sorted(listed - found.keys() - set(PUBLIC)) == [], "no test imports these any more: take them off the list"


def test_importing_varprop_imports_no_extra():
    """Nor torch's compiler, which takes a second and brings triton where it is installed."""
    extras = "{'scipy', 'matplotlib', 'rich', 'jinja2', 'opacus', 'triton', 'torchvision', 'torch._dynamo'}"
    script = f"import sys, varprop; print(*(sys.modules.keys() & {extras}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


# --- the checks themselves, on small trees ---

BAD_TREES = {
    "numpy at the top": (third_party_violations, {"varprop/engine/evaluation.py": "import numpy as np"}),
    "unlisted package in a function": (
        third_party_violations,
        {"varprop/engine/evaluation.py": "def f():\n    import requests"},
    ),
    "extra at the top of a class": (
        third_party_violations,
        {"varprop/engine/evaluation.py": "class A:\n    import scipy.stats"},
    ),
    "extra behind try": (
        third_party_violations,
        {"varprop/engine/evaluation.py": "try:\n    import rich\nexcept ImportError:\n    pass"},
    ),
    "extra in the facade": (third_party_violations, {"varprop/__init__.py": "import matplotlib"}),
    "kernels at the top": (
        kernel_violations,
        {
            "varprop/norm/fold/dispatch.py": "from ..backends import triton",
            "varprop/norm/backends/triton/__init__.py": "",
        },
    ),
    "opacus elsewhere": (third_party_violations, {"varprop/norm/api.py": "def f():\n    import opacus"}),
    "triton outside the kernels": (third_party_violations, {"varprop/norm/layers.py": "import triton"}),
    "root": (root_violations, {"varprop/engine/evaluation.py": "import varprop"}),
    "name from root": (root_violations, {"varprop/rules/linear.py": "from varprop import propagate"}),
    "relative name from root": (root_violations, {"varprop/rules/linear.py": "from .. import propagate"}),
    "upwards": (order_violations, {"varprop/graph/node.py": "from ..rules import linear"}),
    "upwards lazily": (
        order_violations,
        {"varprop/moments.py": "def f():\n    from varprop.engine.evaluation import walk"},
    ),
    "upwards for type checkers": (
        order_violations,
        {"varprop/gaussian/normal.py": "if TYPE_CHECKING:\n    from ..moments import Moments"},
    ),
    "upwards as a module": (
        order_violations,
        {"varprop/rules/registry.py": "from .. import engine", "varprop/engine/evaluation.py": ""},
    ),
    "the library knows no lab": (order_violations, {"varprop/cli/main.py": "def f():\n    import varprop_lab.data"}),
    "inside of the core": (outside_violations, {"varprop_lab/train.py": "from varprop.engine.evaluation import walk"}),
    "hidden name": (outside_violations, {"varprop_lab/train.py": "from varprop import walk_nodes"}),
    "hidden attribute": (outside_violations, {"varprop/cli/main.py": "import varprop as vp\nvp._secret()"}),
}


def grown(tree, root):
    for name, text in {"varprop/__init__.py": "__all__ = ['propagate']", **tree}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("check", "tree"), BAD_TREES.values(), ids=BAD_TREES.keys())
def test_each_check_catches_its_violation(check, tree, tmp_path):
    assert len(list(check(grown(tree, tmp_path)))) == 1


def test_what_is_allowed_passes(tmp_path):
    tree = {
        "varprop/moments.py": "import torch\nimport math\nfrom .gaussian.normal import x",
        "varprop/gaussian/normal.py": "from . import quadrature",
        "varprop/gaussian/quadrature.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
        "varprop/engine/api.py": "from .. import moments\nfrom varprop.rules import linear\nfrom ..graph.a import p",
        "varprop/rules/linear.py": "from .registry import rule\nfrom ..moments import Moments",
        "varprop/rules/registry.py": "from torch import Tensor",
        "varprop/graph/a.py": "",
        "varprop/training/lr.py": "def f():\n    from scipy.optimize import minimize_scalar",
        "varprop_lab/train.py": "import numpy\nimport varprop as vp\nfrom .data import x\nvp.propagate",
        "varprop/cli/main.py": "import rich\nfrom varprop import propagate",
        "varprop_lab/commands.py": "from varprop.cli import main\nfrom . import train",
        "varprop/text_table.py": "",
        "varprop_lab/tables.py": "from varprop.text_table import Table",
    }
    root = grown(tree, tmp_path)
    assert [violation for check in CHECKS for violation in check(root)] == []
    assert cycle(root) is None
    assert homeless_parts(root) == []


CIRCLES = {
    "in the core": {"varprop/norm/a.py": "from .b import x", "varprop/norm/b.py": "from .a import y"},
    "in the lab": {"varprop_lab/a.py": "from . import b", "varprop_lab/b.py": "from varprop_lab import a"},
    "for type checkers": {
        "varprop/norm/a.py": "if TYPE_CHECKING:\n    from .b import x",
        "varprop/norm/b.py": "from .a import y",
    },
    "inside a function": {
        "varprop/norm/a.py": "def f():\n    from .b import x",
        "varprop/norm/b.py": "from .a import y",
    },
}


@pytest.mark.parametrize("tree", CIRCLES.values(), ids=CIRCLES.keys())
def test_circles_are_found(tree, tmp_path):
    assert {Path(name).stem for name in cycle(grown(tree, tmp_path))} == {"a", "b"}


def test_homeless_parts_are_found(tmp_path):
    assert homeless_parts(grown({"varprop/new.py": ""}, tmp_path)) == ["new"]


def test_every_class_has_a_name_of_its_own() -> None:
    """One word has one meaning in the whole of src, a leading underscore apart."""
    names = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")].append(f"{path.relative_to(SOURCE)}: {node.name}")
    assert {name: found for name, found in names.items() if len(found) > 1} == {}
