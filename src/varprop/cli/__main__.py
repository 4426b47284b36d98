"""``python -m varprop.cli``: the command line, as `python -m varprop`."""

from .main import main

main()
