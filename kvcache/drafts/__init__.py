"""Draft tokens: what may follow a text, from n-grams, heads or a small network; the network checks them in one pass."""
