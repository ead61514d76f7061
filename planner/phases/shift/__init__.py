"""Shift parallelism: sequence parallelism for large passes, tensor parallelism for small ones."""
