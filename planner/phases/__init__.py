"""Prefill and decode with plans of their own, and parallelism that follows the load."""
