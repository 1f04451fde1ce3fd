"""`python -m paceline`."""

from paceline.cli import entry

if __name__ == "__main__":
    entry()
