"""What runs inside ranks to verify, measure or rehearse a training; and the ledger of samples."""
