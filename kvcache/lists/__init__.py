"""`CacheManager`: a quantised token list held to a budget."""
