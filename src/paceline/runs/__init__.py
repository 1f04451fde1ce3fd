"""The folder of a run: who may change it, its files, and what people see of a run on the screen. No torch."""
