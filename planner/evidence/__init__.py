"""Published measurements with their sources, and what the model says of the same cases."""
