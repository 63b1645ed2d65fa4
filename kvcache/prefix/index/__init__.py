"""The prefix index: the pages that are cached of each text, their slots, and claims on them."""
