"""The command line: the only package that prints."""

from atlas_fl.cli.main import main as main
