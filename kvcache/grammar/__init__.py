"""Grammars: what the text of an answer may be. Engines need the extra `grammar` to follow them."""

from kvcache.grammar.grammar import Grammar, json_object, json_schema, lark, regex
from kvcache.grammar.trials import Trials

__all__ = ["Grammar", "Trials", "json_object", "json_schema", "lark", "regex"]
