"""Data: what there is, which rank sees which samples when, and how batches get onto the device."""
