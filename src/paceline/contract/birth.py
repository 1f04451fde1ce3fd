"""What a worker is told when it is born."""

from __future__ import annotations

BOOTSTRAP = "paceline.worker.bootstrap"  # runs any script as a worker of our agent
