"""`python -m jaxlayers` is the command line."""

from jaxlayers.cli import entry

entry()
