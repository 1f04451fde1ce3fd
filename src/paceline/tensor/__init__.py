"""A model of which several ranks hold a part each: what is cut, how a layer computes with it, whose state it is."""
