"""What can be chosen: a plan's degrees of freedom, the rules it must keep, and the space of all of them."""
