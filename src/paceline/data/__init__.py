"""Which data there are, who sees which of them when, and how they get onto the device."""
