"""Verify, compare, scale, doctor and ledger. Only `ranks` imports torch."""
