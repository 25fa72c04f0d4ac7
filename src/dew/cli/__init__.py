"""Parse, call, print."""

from dew.cli.app import main

__all__ = ["main"]
