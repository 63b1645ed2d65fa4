"""Block events: which blocks a prefix cache has, for routers, in the form of vLLM."""
