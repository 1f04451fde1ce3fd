"""Custom training loops on any number of ranks: `paceline.session()`."""

from paceline.sessions.session import Session, session

__all__ = ["Session", "session"]
