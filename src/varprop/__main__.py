"""``python -m varprop``: the command line without its being installed."""

from .cli.main import main

main()
