"""What sees into a script that nobody changed, from outside: hooks on torch, and what is made of what they see."""
