"""The token trie: exact to the token, leaf-first eviction."""
