"""The command line, ``kexpfam``."""

from kexpfam.cli.commands import app, main

__all__ = ["app", "main"]
