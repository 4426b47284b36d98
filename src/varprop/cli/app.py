"""The commands and their names; a new command is a file beside this one and a line below."""

from __future__ import annotations

from typing import Annotated

from . import bench, compare, data, demo, doctor, reproduce
from .inspect.command import inspect
from .parser import typer

app = typer.Typer(
    name="varprop",
    help="Fair comparison of normalizations, and the experiments of the paper on analytic variance propagation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("reproduce")(reproduce.reproduce)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.command("inspect")(inspect)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(doctor.own_version())
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Fair comparison of normalizations, and the experiments of the paper on analytic variance propagation."""
