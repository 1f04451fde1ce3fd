"""Proofs and measurements that need a training: the torch side of the commands that ask for them.

verify/     ranks of `paceline verify` (asked and reported in paceline.verify)
bench/      ranks of `paceline compare` and `paceline scale` (paceline.bench)
ledger/     `paceline ledger`: no ranks, but the events of a run and its plan
"""
