"""Texts in flight and their memory, whatever the kind of layer: what the engines run, alone and many at once."""
