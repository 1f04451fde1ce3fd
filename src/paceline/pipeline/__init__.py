"""A model in stages: where it is cut, what one stage computes, in which order, and what stages send each other."""
