"""`python -m paceline`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # -m puts the working folder first: paceline must not import from it
        sys.path.pop(0)
    from paceline.cli import entry

    entry()
