"""Processes that the kernel keeps from the real world, and dreamed episodes in them."""
