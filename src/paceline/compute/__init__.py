"""How a step is computed: precision, threads, memory, compilation. Plain functions over a model, for any loop."""
