"""Saved caches: the file and its tables."""
