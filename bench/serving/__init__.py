"""Benches of many requests at once."""
