"""The hang guard: what each rank shows of itself, and who is to blame when all stand still. No torch here."""
