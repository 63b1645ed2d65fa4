"""`PrefixCache`: full blocks of prompts, shared by the exact tokens that lead to them."""
