"""``python -m varprop.cli``: the command line without its being installed."""

from .main import main

main()
