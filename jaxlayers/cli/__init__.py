"""The command line: `jaxlayers COMMAND ...`."""

from jaxlayers.cli.main import entry, main

__all__ = ["entry", "main"]
