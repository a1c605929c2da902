"""`python -m atlas_fl` is the command `atlas`."""

from atlas_fl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
