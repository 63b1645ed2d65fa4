"""How families of networks write thoughts and calls of tools, read as the text comes."""
