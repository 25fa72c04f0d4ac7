"""The command line."""

import sys


def main() -> None:
    """Run `dew`, whose dependencies are an extra."""
    try:
        from dew.cli.app import main as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("dew"):
            raise
        sys.exit(f"error: {error.name} is not installed.\n→ pip install 'dew-rl[cli]', or an engine: 'dew-rl[trl]'")
    run()
