"""The command line, which draws the pictures of the documents."""

from tests.cli.conftest import cli, home

__all__ = ["cli", "home"]
