"""`PrefixCache`, `PrefixKvCache` and `KvCache`: what is cached of a prompt."""
