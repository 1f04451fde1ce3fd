"""How fast is it, what does it need, and how well does it scale: measured, split into causes, predicted."""
