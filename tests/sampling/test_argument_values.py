"""Values by schemas: what fits is what the package jsonschema says, and a text is read as a value that fits."""

import json
import math

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.errors import GrammarError
from kvcache.sampling.dialects.argument_fit import ArgumentFit
from kvcache.sampling.dialects.argument_schema import ANY_TYPE, TYPES, ArgumentSchema, is_of
from kvcache.sampling.dialects.argument_values import read_value
from kvcache.sampling.dialects.python_words import number_of, python_calls, python_value
from kvcache.sampling.dialects.value_choices import choices_of

pytestmark = pytest.mark.one_build

SCALARS = [None, True, False, 0, 1, 2, 3, 7, 12, 0.5, 1.0, -2.5, 1e30, "", "a", "1", "true", "null", "None", "+3"]
OTHERS = [
    [], [1], ["a", 2], [[], None], {}, {"a": 1}, {"b": "a"}, {"a": {"a": {}}}, {"a": 3, "c": [1]}, {"a": 1, "b": None},
]
VALUES = [*SCALARS, *OTHERS]
REFERENCES = st.sampled_from([
    "#/$defs/text", "#/$defs/a~1b", "#/$defs/c~0d", "#/$defs/e%20f", "#/$defs/either/anyOf/0", "#/$defs/either/anyOf/1",
    "#/$defs/tree", "#/$defs/either", "#",
])
LIMITS = st.sampled_from([
    {}, {}, {"minimum": 2}, {"maximum": 5}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 7}, {"multipleOf": 2},
    {"minLength": 2}, {"maxLength": 1}, {"minItems": 1}, {"maxItems": 1}, {"minProperties": 1}, {"maxProperties": 1},
    {"required": ["a"]}, {"additionalProperties": False}, {"title": "x"},
])


def schemas_of(inner):
    some, members = st.lists(inner, min_size=1, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    return st.one_of(
        st.builds(lambda each: {"anyOf": each}, some), st.builds(lambda each: {"oneOf": each}, some),
        st.builds(lambda each: {"allOf": each}, some), st.builds(lambda each: {"not": each}, inner),
        st.builds(lambda each, limit: {"type": "object", "properties": each, **limit}, members, LIMITS),
        st.builds(lambda each, more: {"properties": each, "additionalProperties": more}, members, inner),
        st.builds(lambda each, limit: {"items": each, **limit}, inner, LIMITS),
        st.builds(lambda each, rest: {"type": "array", "prefixItems": each, "items": rest}, some, inner),
        st.builds(lambda each, reference: {"allOf": [each], "$ref": reference}, inner, REFERENCES),
    )


SIMPLE = st.one_of(
    st.builds(lambda kind, limit: {"type": kind, **limit}, st.sampled_from(sorted(TYPES)), LIMITS),
    st.builds(lambda kinds: {"type": kinds}, st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)), LIMITS, st.booleans(),
)
SCHEMAS = st.recursive(
    SIMPLE | st.builds(lambda reference: {"$ref": reference}, REFERENCES), schemas_of, max_leaves=5
)


def rooted(schema, other):
    """The schema of arguments, with definitions that references lead to."""
    definitions = {
        "text": {"type": "string"}, "a/b": {"type": ["integer", "null"]}, "c~d": other, "e f": {"enum": ["1", "red"]},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "integer"}}]},
        "tree": {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}},
    }
    return {"$defs": definitions, "properties": {"v": schema}}


def fitting(schema, root):
    """Whether each of the values fits by the package; none: a reference to itself never ends."""
    validator = jsonschema.Draft202012Validator({**root, "properties": {"v": schema}})
    try:
        return [(value, validator.is_valid({"v": value})) for value in VALUES]
    except RecursionError:
        return []


@given(schema=SCHEMAS, other=SIMPLE)
def test_what_fits_is_what_jsonschema_says(schema, other):
    root = rooted(schema, other)
    known = ArgumentSchema(root)
    for value, fits in fitting(schema, root):
        assert ArgumentFit(known).fits(value, schema) == fits, value
        allowed = known._types_of(schema, False, frozenset())
        assert not fits or any(is_of(value, kind) for kind in allowed), "types leave out nothing but by hints"


@given(schema=SCHEMAS, other=SIMPLE, guesses=st.booleans())
def test_a_value_that_fits_is_read_as_one_that_fits(schema, other, guesses):
    """As a family writes it, a text as it is and else JSON, or Python's words. Where this is several values, one that
    fits is read."""
    root = rooted(schema, other)
    known, some = ArgumentSchema(root), fitting(schema, root)
    types, validator = known.types(schema), jsonschema.Draft202012Validator({**root, "properties": {"v": schema}})
    for value, fits in some:
        for text in [value] if isinstance(value, str) else [json.dumps(value), str(value)]:
            found = read_value(text, schema, known, guesses=guesses)
            if types == ANY_TYPE and not guesses:
                assert found == text
            elif fits and any(is_of(value, kind) for kind in types):
                assert validator.is_valid({"v": found}), (text, found)
                assert found == value or "string" in types


@given(schema=SCHEMAS, other=SIMPLE)
def test_alternatives_say_the_same(schema, other):
    """A schema divided into those without choices, and one with all that it refers to, take the same values."""
    root = rooted(schema, other)
    known = ArgumentSchema(root)
    contained, alternatives = jsonschema.Draft202012Validator(known.contained(schema)), known.alternatives(schema)
    for value, fits in fitting(schema, root):
        assert contained.is_valid(value) == fits, value
        found = any(ArgumentFit(known).fits(value, each) for each in alternatives)
        assert found == fits or (found and "oneOf" in str(root)), value


READ = [
    ({"type": "boolean"}, {"True": True, "False": False, "true": True, "1": 1, "yes": "yes"}),
    ({"type": ["boolean", "null"]}, {"None": None, "null": None}),
    ({"type": "integer"}, {"+3": 3, "1_000": 1000, "007": 7, " 5 ": 5, "-0": 0, "x": "x", "1__0": "1__0", "5.0": 5.0}),
    ({"type": "number"}, {".5": 0.5, "-.5e1": -5.0, "5.": 5.0, "1e999": "1e999", "-1e999": "-1e999", "NaN": "NaN",
                          "Infinity": "Infinity", "9" * 5000: "9" * 5000}),
    ({"enum": [True, False]}, {"True": True}), ({"enum": ["True", True]}, {"True": "True", "true": True}),
    ({"type": "array"}, {"[True, None, 'a', (1, .5)]": [True, None, "a", [1, 0.5]], "[1e999]": ["1e999"],
                         "[{1}]": "[{1}]"}),
    ({"type": "object"}, {"{'a': \"b'\", 1: None}": {"a": "b'", 1: None}, '{"a": "x\ny"}': {"a": "x\ny"}}),
    ({"type": ["string", "null"]}, {"null": None, "None": "None", "5": "5", '"a"': '"a"'}),
    ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}]}, {"7": 7, "3": "3", "True": "True"}),
    ({"type": "integer", "minimum": 5}, {"3": 3}), ({"properties": {}}, {"{}": {}, "5": 5, "a": "a"}),
]


def test_readings_of_texts():
    for schema, texts in READ:
        for text, wanted in texts.items():
            found = read_value(text, schema, ArgumentSchema({}))
            assert (found, type(found)) == (wanted, type(wanted)), (schema, text)


def test_python_words():
    for text, wanted in {
        "[f(s='it\\'s', from=\"Rome\", in=[1], class={'a': {}},)]": [("f", {
            "s": "it's", "from": "Rome", "in": [1], "class": {"a": {}}})],
        "get-weather(city='x')": [("get-weather", {"city": "x"})],
        "[a.b(), mcp__x-y(k='''a'b\"''' 'c'), ]": [("a.b", {}), ("mcp__x-y", {"k": "a'b\"c"})],
        r"f(a='\x41\u00e9\101\n\q\
\ud83d\ude00', b=r'\n')": [("f", {"a": "Aé" + "A\n\\q😀", "b": r"\n"})],
    }.items():
        assert python_calls(text) == wanted
    for text in ("", "f", "f(1)", "f(a)", "f(a=)", "[f()", "f()]", "f(a=b)", "f(a='x)", "f(a=1 b=2)", r"f(a='\ud83d')",
                 "f(**x)", "[f(), g() h()]", "f(a=[" + "[" * 200, "f(a={[]: 1})", "f(a=1)."):
        with pytest.raises(Exception) as error:  # noqa: PT011  # any of these
            python_calls(text)
        assert error.type.__name__ in ("NoCall", "ValueError", "TypeError", "UnicodeDecodeError"), text
    assert python_value(" {'a': (True, null)} ") == {"a": [True, None]}
    assert math.isclose(number_of("1_0.5e-1"), 1.05)


def test_hostile_schemas_take_bounded_time():
    """Choices within choices, references in circles, and lists of parts without end."""
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    circles = {name: {key: [{"$ref": f"#/$defs/{other}"}] * 300} for name, key, other in (
        ("a", "anyOf", "b"), ("b", "allOf", "a"), ("c", "oneOf", "c"))}
    for name in ("d0", "a", "c"):
        known = ArgumentSchema({"$defs": doubled | circles})
        schema = {"$ref": f"#/$defs/{name}"}
        assert known.types(schema) == ANY_TYPE
        assert read_value("7", schema, known, guesses=True) in (7, "7")
        assert known.property_of("x", schema) == {}
        some = [{"anyOf": [{key: each} for each in range(40)]} for key in ("minimum", "maximum")]
        with pytest.raises(GrammarError, match="grammar: expected a schema of at most 1000 choices"):
            known.alternatives({"allOf": [*some, schema]})


def test_long_lists_take_bounded_time():
    """Lists of 50,000 values, which references and parts repeat, are compared once; numbers are those of JSON."""
    many = {"enum": list(range(50_000))}
    known = ArgumentSchema({"$defs": {"e": many}})
    assert read_value("-1", {"anyOf": [{"$ref": "#/$defs/e"}] * 4000}, known) == "-1"
    assert read_value("49999", {"anyOf": [{"$ref": "#/$defs/e"}] * 500}, known) == 49_999
    texts = [f"v{i}" for i in range(10_000)]
    assert choices_of({"enum": texts}, known, strict=True).literals == texts
    parts = [{"enum": [*texts, 1]}, {"enum": [1.0, True, "v7"]}, {"required": texts}, {"required": texts[::-1]}]
    (both,) = ArgumentSchema({}).alternatives({"allOf": parts})
    assert both == {"enum": ["v7", 1], "required": texts}
    slow = {"enum": texts[:5000], "not": {"anyOf": [{"const": "w"}] * 50}}
    with pytest.raises(GrammarError, match="grammar: expected a schema of values beside few limits"):
        choices_of(slow, ArgumentSchema({}), strict=True)
    known = ArgumentSchema({})
    assert choices_of(slow, known, strict=False).literals == texts[:5000]
    assert known.steps == 0
    some = [{"anyOf": [{"enum": texts[i:]} for i in range(30)]} for _ in range(2)]
    with pytest.raises(GrammarError, match="grammar: expected a schema of at most 1000 choices"):
        ArgumentSchema({}).alternatives({"allOf": some})
    known = ArgumentSchema({})
    parts = {"allOf": [{"enum": texts[:5000]}, {"enum": texts[4999:]}]}
    while known.steps > 1000:  # of all questions about one function
        assert choices_of(parts, known, strict=True).literals == texts[4999:5000]
    with pytest.raises(GrammarError, match="grammar: expected a schema of at most 1000 choices"):
        known.alternatives({"allOf": [parts] * 3})
    with pytest.raises(GrammarError, match="grammar: expected a schema with keywords of their kinds"):
        ArgumentSchema({}).alternatives({"allOf": [{"minimum": {}}, {"minimum": {"a": 1}}]})
    with pytest.raises(GrammarError, match="grammar: expected a schema of values beside few limits, without patterns"):
        choices_of({"enum": ["a", "b"], "pattern": "a"}, ArgumentSchema({}), strict=True)


def test_schemas_that_are_none_and_choices_in_many_choices():
    """A keyword that says what cannot be computed says nothing, and neither does a schema of 2,000 levels."""
    known = ArgumentSchema({})
    for limit in (0, 0.0):
        schema = {"type": ["number"], "multipleOf": limit}
        assert read_value("5", schema, known) == 5
        assert choices_of({**schema, "enum": [5]}, known, strict=True).others == [{"enum": [5]}]
    deep = {"type": "string"}
    for _ in range(2000):
        deep = {"anyOf": [deep, {"type": "integer"}]}
    assert known.types(deep) == ANY_TYPE
    with pytest.raises(GrammarError, match="grammar: expected a schema of at most 1000 choices"):
        known.alternatives(deep)
