"""The few things of typer that the commands use, on argparse: for where typer is not installed.

Commands are declared once, by the annotations of their functions, and both read these. What typer has beyond it,
colours and the completion of names by the shell, is missing here.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

Command = Callable[..., None]
echo = print
Exit = SystemExit


class Declared(NamedTuple):
    """What is said of a parameter: of an option its names, of an argument none."""

    is_option: bool
    names: tuple[str, ...]
    settings: dict[str, Any]


def Option(*names: str, **settings: Any) -> Any:
    """Declare an option; without a name it is called like its parameter."""
    return Declared(True, names, settings)


def Argument(**settings: Any) -> Any:
    """Declare an argument."""
    return Declared(False, (), settings)


class Typer:
    """Commands and groups of them, by name."""

    def __init__(self, name: str = "", help: str = "", **_: Any) -> None:
        self.name, self.help = name, help
        self.commands: dict[str, Command | Typer] = {}
        self.options: Command = lambda: None

    def command(self, name: str) -> Callable[[Command], Any]:
        """Register a function as a command."""
        return lambda function: self.commands.setdefault(name, function)

    def callback(self) -> Callable[[Command], Command]:
        """Register the function whose parameters are the options before any command."""

        def register(function: Command) -> Command:
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
        for name, (_, declared, _) in _parameters(self.options).items():
            declared.settings.get("callback", lambda value: None)(given.pop(name))
        if "function" not in given:
            parser.print_help(sys.stderr)
            raise Exit(2)
        given.pop("function")(**given)
        raise Exit(0)

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


def _parameters(function: Command) -> dict[str, tuple[Any, Declared, Any]]:
    """Type, declaration and default of every parameter."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.items()
    return {name: (*get_args(hints[name])[:2], parameter.default) for name, parameter in parameters}


def _declare(parser: argparse.ArgumentParser, function: Command) -> None:
    for name, (kind, declared, default) in _parameters(function).items():
        one, several = _plain_type(kind)
        required = default is inspect.Parameter.empty
        settings: dict[str, Any] = {"help": _help(declared, default), "default": None if required else default}
        if declared.is_option:
            settings |= {"dest": name, "required": required}
            names = declared.names or (f"--{name.replace('_', '-')}",)
        else:
            settings |= {"nargs": "+" if several else None if required else "?", "metavar": name.upper()}
            names = (name,)
        if one is bool:
            settings["action"] = "store_true"
        else:
            settings |= _of_values(one, declared) | ({"action": "append"} if several and declared.is_option else {})
        parser.add_argument(*names, **settings)


def _plain_type(kind: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several; None beside it is left aside."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
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
