"""What both sides of a fork or exec share: plans, orders, the box, failure records. No torch."""
