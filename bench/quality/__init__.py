"""`python -m bench quality`: the end-to-end cost of compression, eviction and endless text, on held-out text."""
