"""The ledger of samples: was each one used exactly once an epoch, judged from what a run has written down."""
