"""The version of varprop."""

__version__ = "0.1.0"
