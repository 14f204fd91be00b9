"""The command line. The only folder that prints, parses arguments or exits."""

from bitdial.cli.entry import main

__all__ = ["main"]
