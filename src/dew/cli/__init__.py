"""The command line: parse, call, print."""

from dew.cli.app import main

__all__ = ["main"]
