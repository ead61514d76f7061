"""Prefill and decode on pools of chips of their own."""
