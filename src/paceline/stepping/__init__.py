"""One optimizer step, the same for tasks and for loops of your own."""
