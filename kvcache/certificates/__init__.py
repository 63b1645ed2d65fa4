"""Certificates: prompts that are computed in every way, one digest of all their bits, and a comparison of machines."""
