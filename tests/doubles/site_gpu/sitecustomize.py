"""With this folder on PYTHONPATH, every process that imports torch has the GPU in Python."""

from paceline.rank.imports import when_imported


def _install() -> None:
    from tests.doubles import gpu

    gpu.install()


when_imported("torch", _install)
