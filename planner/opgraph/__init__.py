"""Strategies beyond templates: operator graphs, a simulator of their execution, and searches over their strategies."""
