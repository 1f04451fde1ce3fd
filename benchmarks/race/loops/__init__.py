"""The loops of the peers, as their own tutorials write them."""
