"""`python -m bench quality`: what compression, eviction and endless text cost, end to end, on text never seen."""
