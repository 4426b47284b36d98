"""Every public object says what it takes, returns and raises, with an example that runs.

The examples take `torch`, `nn` and `vp` as imported, as the reference (docs/api.md) says.
"""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import nn

import varprop as vp
from varprop.rules import registry

# A captured model is handed on: its methods serve the parts of varprop that read graphs.
OPAQUE = (vp.Program,)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public():
    """Functions, classes and their methods by name; properties are described by their class."""
    names = [*vp.__all__, *(f"callbacks.{name}" for name in vars(vp.callbacks) if name[0] != "_")]
    for name in names:
        value = vp.callbacks
        value = getattr(value, name.removeprefix("callbacks.")) if "." in name else getattr(vp, name)
        if getattr(value, "__module__", "").startswith("varprop") and callable(value):
            yield name, value
            if inspect.isclass(value) and value not in OPAQUE:
                yield from methods(name, value)


def methods(name, cls):
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("varprop"):
            for attribute in vars(base):
                method = inspect.unwrap(getattr(cls, attribute))
                if attribute[0] != "_" and inspect.isroutine(method):
                    yield f"{name}.{attribute}", getattr(cls, attribute)


PUBLIC = dict(public())


def sections(documented):
    return {line.strip(" :") for line in (inspect.getdoc(documented) or "").splitlines() if line.endswith(":")}


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_documented(name):
    documented = PUBLIC[name]
    text = inspect.getdoc(documented) or ""
    assert ">>> " in text, "no example"
    if inspect.isclass(documented):
        return
    signature = inspect.signature(documented)
    arguments = [argument for argument in signature.parameters if argument != "self"]
    assert not arguments or "Args" in sections(documented), "arguments are not described"
    for argument in arguments:
        assert f"{argument}: " in text, f"{argument} is not described"
    returns = signature.return_annotation
    assert returns in (None, "None") or "Returns" in sections(documented), "what it returns is not described"
    if "raise " in inspect.getsource(inspect.unwrap(documented)):
        assert "Raises" in sections(documented), "what it raises is not described"


@pytest.fixture
def undisturbed():
    """Rules that examples register are gone afterwards; figures are not shown."""
    matplotlib.use("Agg")
    before = registry.registered()
    yield
    registry.unregister(*(registry.registered().keys() - before.keys()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, undisturbed):
    run_examples(name, PUBLIC[name])


def elsewhere():
    """Examples of what is not public, by name, wherever they stand; the extra for Opacus is not installed here."""
    source = Path(vp.__file__).parent
    known = {inspect.getdoc(documented) for documented in PUBLIC.values()}
    for file in source.rglob("*.py"):
        if ">>> " in file.read_text("utf-8") and file.name != "opacus.py":
            module = import_module(".".join(file.relative_to(source.parent).with_suffix("").parts))
            for found in doctest.DocTestFinder(exclude_empty=True).find(module):
                if found.examples and inspect.cleandoc(found.docstring) not in known:
                    yield found.name, found.docstring


ELSEWHERE = dict(elsewhere())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_examples_of_what_is_not_public_run(name, undisturbed):
    run_text(name, ELSEWHERE[name], vars(import_module(module_of(name))))


def module_of(name):
    """The module that defines an object named with its whole path."""
    parts = name.split(".")
    source = Path(vp.__file__).parents[1]
    return next(
        ".".join(parts[:count])
        for count in range(len(parts), 0, -1)
        if source.joinpath(*parts[:count]).with_suffix(".py").is_file()
    )


@pytest.mark.slow
def test_the_example_of_the_lab_runs():
    import varprop_lab

    run_examples("compare", varprop_lab.compare)


def run_examples(name, documented):
    run_text(name, inspect.getdoc(documented) or "", {})


def run_text(name, text, names):
    torch.manual_seed(0)
    names = names | {"torch": torch, "nn": nn, "vp": vp}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert results.failed == 0, "".join(said)
