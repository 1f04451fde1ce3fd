"""What ranks agree on between two steps: named numbers that travel in a step's totals."""

from typing import NamedTuple


class Votes(NamedTuple):
    """Of one rank 1 or 0 for each; added up, how many ranks say it. Its order is that of the slots in the totals."""

    stop: float = 0.0
    """was asked to end the run"""
    written: float = 0.0
    """has its file of the checkpoint that is on its way on disk"""
    failed: float = 0.0
    """could not write it"""
    due: float = 0.0
    """finds by its clock that a checkpoint is due; rank 0 alone looks"""
    end: float = 0.0
    """has been told by a callback that the training is over"""
    save: float = 0.0
    """was asked to save a checkpoint now"""
    coming: float = 0.0
    """how many samples of a stream it has for the next global batch; 0 where the data are no stream"""
