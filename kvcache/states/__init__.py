"""`PrefixKvCache` and `KvCache`: K and V of whole prompts, in plain vectors."""
