"""The state of a training, saved and loaded: by any strategy, on any number of ranks.

    state        the state as named tensors (`TensorShard`), and where it is loaded from (`Source`)
    shards       the shards of one rank; a rank's part of the state as a safetensors file; the whole state on every rank
    format       manifest.json, and the checks of all files (without torch)
    manager      the folder of checkpoints: claim, begin, commit, retention (without torch)
    snapshots    states in memory, for restarted workers
    resume       the run folder, and the newest state in memory or on disk
    export       a model's state_dict from a checkpoint
    reductions   how the values of a buffer on several virtual ranks become one value

Write   replica.state() -> rank_part -> layout -> fill (copy) -> write_new (thread) -> commit: manifest, fsync, rename
Read    entries -> check: manifest, sizes, hashes -> ShardFiles, a `Source` -> replica.load

`train/checkpointing.py` decides when, and coordinates the ranks.
"""
