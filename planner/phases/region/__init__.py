"""Which plan leads where two options vary, and what one plan for all of it loses."""
