"""Models that know nothing of parallelism: what a user would write for one device."""
