"""The few things of typer that the commands use, on argparse: for where typer is not installed.

Commands are declared once, by the annotations of their functions, and both read these. What typer has beyond it,
colours and the completion of names by the shell, is missing here.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints


class Exit(Exception):
    """Ends the command with a status."""

    def __init__(self, code: int = 0) -> None:
        self.code = code


@dataclass(frozen=True)
class Declared:
    """What is said of a parameter: of an option its names, of an argument none."""

    is_option: bool
    names: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def Option(*names: str, **settings: Any) -> Any:
    """Declare an option; without a name it is called like its parameter."""
    return Declared(True, names, settings)


def Argument(**settings: Any) -> Any:
    """Declare an argument."""
    return Declared(False, (), settings)


def echo(text: str) -> None:
    """Print a line."""
    print(text)


class Typer:
    """Commands and groups of them, by name."""

    def __init__(self, name: str = "", help: str = "", **_: Any) -> None:
        self.name, self.help = name, help
        self.commands: dict[str, Callable[..., None] | Typer] = {}
        self.options: Callable[..., None] = lambda: None

    def command(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register a function as a command."""
        return lambda function: self.commands.setdefault(name, function)

    def callback(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register the function whose parameters are the options before any command."""

        def register(function: Callable[..., None]) -> Callable[..., None]:
            self.options = function
            return function

        return register

    def add_typer(self, group: Typer, name: str) -> None:
        """Register a group of commands."""
        self.commands[name] = group

    def __call__(self, args: Sequence[str], prog_name: str) -> NoReturn:
        """Run the command that the arguments name, and exit."""
        parser = argparse.ArgumentParser(prog_name, description=self.help)
        self.fill(parser)
        given = vars(parser.parse_args(list(args)))
        try:
            for name, callback in _callbacks(self.options).items():
                callback(given.pop(name))
            if "function" not in given:
                parser.print_help(sys.stderr)
                raise Exit(2)
            given.pop("function")(**given)
        except Exit as ended:
            raise SystemExit(ended.code) from None
        raise SystemExit(0)

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the options and commands."""
        _declare(parser, self.options)
        commands = parser.add_subparsers(metavar="COMMAND")
        for name, one in self.commands.items():
            text = one.help if isinstance(one, Typer) else inspect.getdoc(one) or ""
            inner = commands.add_parser(name, help=text.splitlines()[0], description=text)
            if isinstance(one, Typer):
                one.fill(inner)
            else:
                _declare(inner, one)
                inner.set_defaults(function=one)


def _parameters(function: Callable[..., None]) -> dict[str, tuple[Any, Declared, Any]]:
    """Type, declaration and default of every parameter."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, declared = get_args(hints[name])[:2]
        found[name] = (kind, declared, parameter.default)
    return found


def _callbacks(function: Callable[..., None]) -> dict[str, Callable[[Any], None]]:
    declared = {name: declared for name, (_, declared, _) in _parameters(function).items()}
    return {name: one.settings.get("callback", lambda value: None) for name, one in declared.items()}


def _declare(parser: argparse.ArgumentParser, function: Callable[..., None]) -> None:
    for name, (kind, declared, default) in _parameters(function).items():
        inner, several = _plain_type(kind)
        settings: dict[str, Any] = {"help": _help(declared, default)}
        if declared.is_option:
            settings |= {"dest": name, "required": default is inspect.Parameter.empty}
            settings["default"] = None if settings["required"] else default
            names = declared.names or (f"--{name.replace('_', '-')}",)
        else:
            names = (name,)
            optional = default is not inspect.Parameter.empty
            settings |= {"nargs": "+" if several else "?" if optional else None, "metavar": name.upper()}
            settings |= {"default": default} if optional else {}
        if inner is bool:
            settings["action"] = "store_true"
        else:
            settings |= _of_values(inner, declared)
            settings |= {"action": "append"} if several and declared.is_option else {}
        parser.add_argument(*names, **settings)


def _plain_type(kind: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several; None beside it is left aside."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return (get_args(kind)[0], True) if get_origin(kind) is list else (kind, False)


def _help(declared: Declared, default: Any) -> str:
    if declared.settings.get("hidden"):
        return argparse.SUPPRESS
    shown = default not in (None, False, inspect.Parameter.empty) and declared.is_option
    value = default.value if isinstance(default, Enum) else default
    text: str = declared.settings.get("help", "") + (f" [default: {value}]" if shown else "")
    return text.replace("%", "%%")


def _of_values(kind: Any, declared: Declared) -> dict[str, Any]:
    """How a value is read, and which are allowed."""
    if issubclass(kind, Enum):
        return {"type": kind, "choices": list(kind), "metavar": "|".join(one.value for one in kind)}
    least, most = declared.settings.get("min"), declared.settings.get("max")

    def read(text: str) -> Any:
        value = kind(text)
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
            raise argparse.ArgumentTypeError(f"{text} must be {' and '.join(bounds)}")
        return value

    read.__name__ = kind.__name__
    return {"type": read, "metavar": kind.__name__.upper()} if declared.is_option else {"type": read}
