"""The state of a training, which any strategy on any number of ranks can save and load.

state: named tensors; shards: a rank's part of them as a file; manager: the folder of checkpoints; snapshots: states in
memory; resume: the newest state; export: a state_dict; buffer_reductions. The manifest: runs.checkpoint_format.

Write   replica.state() -> select_shards_to_save -> make_shard_layout -> serialize_shard_file (copy) ->
        write_new_file (thread) -> commit: manifest, fsync, rename
Read    entries -> check: manifest, sizes, hashes -> ShardFileSource, a `StateSource` -> replica.load
"""
