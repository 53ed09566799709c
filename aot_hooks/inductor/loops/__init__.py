"""Operators as one loop."""
