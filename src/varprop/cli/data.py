"""``varprop data``: fetching data sets."""

from __future__ import annotations

from typing import Annotated

from .errors import stoppable
from .options import RootOption
from .parser import typer

app = typer.Typer(help="Data sets.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Data sets."""


@app.command("get")
def get(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAMES...", help="mnist, cifar10", autocompletion=lambda: ["mnist", "cifar10"]),
    ],
    root: RootOption = None,
) -> None:
    """Fetch data sets from their official sources, check them, and lay them down in their official layout.

    What is there already is left alone.
    """
    from varprop_lab.data import download

    with stoppable("Run the command again: what is finished is kept."):
        for name in dict.fromkeys(names):
            place = download.get(name, root, say=typer.echo)
            typer.echo(f"{name} is in {place}")
