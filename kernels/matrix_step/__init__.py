"""One token of the recurrences with a matrix State, shared by gated linear attention, the delta rule and what is made of them."""
