"""The command line: the only package that prints."""

from atlas_fl.cli.commands import main as main
