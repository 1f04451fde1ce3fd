"""The command as a user types it."""

from tests.cli.conftest import paceline

__all__ = ["paceline"]
