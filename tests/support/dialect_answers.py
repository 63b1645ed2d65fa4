"""Answers in every dialect with their thoughts, content and calls, the marks of dialects, and tokenizers of marks."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvcache.sampling.dialects.dialect_table import DIALECTS

MARKS = sorted({mark for dialect in DIALECTS.values() for mark in dialect.marks} | {"<think>", "</think>"})
# These are no special tokens in the vocabularies of their families.
PLAIN = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<response>", "</response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<function=", "</function>", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>",
    "</tool_calls>", '<function name="', '<invoke name="', "</invoke>",
)
TYPES = {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "string"]}, "l": {"type": "array"}}
SCHEMAS = {"f": {"properties": TYPES}}


SPECIAL = tuple(mark for mark in MARKS if mark not in PLAIN)


def mark_tokenizer(special=SPECIAL, plain=PLAIN):
    """A tokenizer with a token for each byte and for each mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    made.add_tokens([AddedToken(mark, special=False) for mark in plain])
    return made


# The name of a dialect, a text in its words, and (thoughts, content, calls).
ANSWERS = [
    ("hermes", 'Hi \n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", "Hi", [("f", {"a": 1})])),
    ("hermes", '<think>\nhm <b>\n</think>\n\nSo.\n', ("hm <b>", "So.\n", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
     ("", "", [("f", {}), ("g", {})])),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"é": "</b>"}}]</tool_call>.',
     ("", ".", [("f", {}), ("g", {"é": "</b>"})])),
    ("hermes", 'a <tool_call>{"name": "f"', ("", 'a <tool_call>{"name": "f"', [])),
    ("hermes", 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b ',
     ("", 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b ', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
     ("", "NaN}}", [("f", '{"a": ')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>b', ("", "b", [("f", {"a": 1})])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}; {"name": "g", "id": [1], "arguments": {}}</tool_call>',
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}} x</tool_call>', ("", "} x", [("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}, {"name": 3}</tool_call>',
     ("", '{"name": 3}', [("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"é": "\\ud83d\\udc08\\n"}, "x": [{}]}</tool_call>',
     ("", "", [("f", {"é": "🐈\n"})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
     ("", '"}}', [("f", '{"a": "\\ud83d')])),
    ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
     ("", "", [("f", {"a": 1})])),
    ("hermes", "the tag <think> is </think> text", ("", "the tag <think> is </think> text", [])),
    ("hermes", "a < b <tool", ("", "a < b <tool", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=s>\n1\n\n</parameter>\n"
     "<parameter=o>\n{\"x\": 1}\n</parameter>\n<parameter=other>\ntrue\n</parameter>\n</function>\n</tool_call>",
     ("", "", [("f", {"a": 7, "s": "1\n", "o": {"x": 1}, "other": "true"})])),
    ("qwen3_coder", "<tool_call><function=f></function><function=g><parameter=x>y</parameter></function>",
     ("", "", [("f", {}), ("g", {"x": "y"})])),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>1</parameter> x <parameter=s>2</function></tool_call>",
     ("", "x <parameter=s>2</function>", [("f", '{"s": "1"')])),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>",
     ("", "<tool_call><function=f><parameter=a>1</function></tool_call>", [])),
    ("glm", "\n<think>hm</think>\nI look.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"
     "<arg_key>s</arg_key>\n<arg_value>1\n</arg_value>\n</tool_call>",
     ("hm", "I look.", [("f", {"a": 7, "s": "1\n"})])),
    ("glm", "<tool_call>f<arg_key>o</arg_key><arg_value>{\"x\": 1}</arg_value><arg_key>t</arg_key><arg_value>[true]"
     "</arg_value><arg_key>u</arg_key><arg_value>NaN</arg_value></tool_call><tool_call>g</tool_call>",
     ("", "", [("f", {"o": {"x": 1}, "t": [True], "u": "NaN"}), ("g", {})])),
    ("glm", '<tool_call>f<arg_key>l</arg_key><arg_value>["</arg_value>", "</ar"]</arg_value></tool_call>',
     ("", "", [("f", {"l": ["</arg_value>", "</ar"]})])),
    ("qwen3_coder", '<tool_call><function=f><parameter=l>["\\"</parameter>x</parameter></function></tool_call>',
     ("", '<tool_call><function=f><parameter=l>["\\"</parameter>x</parameter></function></tool_call>', [])),
    ("hy3", "<think:opensource>hm</think:opensource>I look.<tool_calls:opensource>\n<tool_call:opensource>f"
     "<tool_sep:opensource>\n<arg_key:opensource>a</arg_key:opensource>\n<arg_value:opensource>7"
     "</arg_value:opensource>\n<arg_key:opensource>s</arg_key:opensource>\n<arg_value:opensource>1\n"
     "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>g<tool_sep:opensource>\n"
     "</tool_call:opensource>\n</tool_calls:opensource>",
     ("hm", "I look.", [("f", {"a": 7, "s": "1\n"}), ("g", {})])),
    ("hy3", "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>o"
     "</arg_key:opensource>\n<arg_value:opensource>{\"x\": 1}</arg_value:opensource>\n</tool_call:opensource>",
     ("", "", [("f", {"o": {"x": 1}})])),
    ("glm", "<tool_call>f\n</tool_call>\n<tool_call>g</tool_call>.", ("", ".", [("f", {}), ("g", {})])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", ("", "", [("f", '{"a": 1')])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>", ("", "x", [("f", '{"a": 1')])),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>",
     ("", "<tool_call>f<arg_key>a</arg_key></tool_call>", [])),
    ("glm", "<tool_call>f g</tool_call>", ("", "<tool_call>f g</tool_call>", [])),
    ("glm", '<tool_call>{"name": "f"}</tool_call> <tool_call>f',
     ("", '<tool_call>{"name": "f"}</tool_call> <tool_call>f', [])),
    ("minimax", '<think>\nhm\n</think>\n\nHi\n<minimax:tool_call>\n<invoke name="f">\n'
     '<parameter name="a">7</parameter>\n<parameter name="s">\n1</parameter>\n'
     '<parameter name="u">null</parameter>\n<parameter name="l">["</parameter>"]</parameter>\n</invoke>\n'
     '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
     ("hm", "Hi", [("f", {"a": 7, "s": "\n1", "u": None, "l": ["</parameter>"]}), ("g", {})])),
    ("minimax", '<minimax:tool_call><invoke name="f"><parameter>',
     ("", '<minimax:tool_call><invoke name="f"><parameter>', [])),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("deepseek", "hm</think>Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
     "{\"a\":\n1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n``<｜tool▁calls▁end｜>",
     ("", "hm</think>Hi``", [("f", {"a": 1}), ("g", {})])),
    ("deepseek", "<think>hm<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": <｜tool▁calls▁end｜>x",
     ("hm", "x", [("f", '{"a": ')])),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>.",
     ("", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>.", [])),
    ("kimi", "<think>so</think>Now<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|> functions.g-1:12 '
     "<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
     ("so", "Now", [("f", {"a": 1}), ("g-1", {})])),
    ("kimi", '<think>so<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>',
     ("so", "", [("f", {})])),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", {"a": 1})])),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "x"}}; {"name": "g"}',
     ("", "", [("f", {"a": "x"}), ("g", {})])),
    ("llama3", ' [f(a=1, s="x"), g(l=[true, None], d={"k": -1.5})]',
     ("", "", [("f", {"a": 1, "s": "x"}), ("g", {"l": [True, None], "d": {"k": -1.5}})])),
    ("llama3", '{"answer": 42}', ("", '{"answer": 42}', [])),
    ("llama3", "[1, 2]", ("", "[1, 2]", [])),
    ("llama3", '{"name": "f", "para', ("", '{"name": "f", "para', [])),
    ("llama4", '<|python_start|>[f(a=1, s="x"), g(l=[True, None])]<|python_end|>',
     ("", "", [("f", {"a": 1, "s": "x"}), ("g", {"l": [True, None]})])),
    ("llama4", 'Now <|python_start|>{"name": "f", "parameters": {"a": 1}}<|python_end|>',
     ("", "Now", [("f", {"a": 1})])),
    ("llama4", "[f(a='x')]", ("", "", [("f", {"a": "x"})])),
    ("llama4", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", {"a": 1})])),
    ("llama4", "<|python_start|>print(1)<|python_end|>", ("", "<|python_start|>print(1)<|python_end|>", [])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("mistral", '[THINK]so[/THINK]Now[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{"b": [2]}',
     ("so", "Now", [("f", {"a": 1}), ("g", {"b": [2]})])),
    ("mistral", "Now[TOOL_CALLS]f[ARGS]{", ("", "Now", [("f", "{")])),
    ("mistral", "Now[TOOL_CALLS]f[ARGS]", ("", "Now[TOOL_CALLS]f[ARGS]", [])),
    ("mistral", "[TOOL_CALLS]f g[ARGS]{}", ("", "[TOOL_CALLS]f g[ARGS]{}", [])),
    ("harmony", "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi\n",
     ("Think.", "Hi\n", [])),
    ("harmony", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
     ("A", "Look:", [("f", {"a": 1})])),
    ("harmony", "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}", ("", "", [("g", {})])),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{\"a\": ", ("", "", [("f", '{"a": ')])),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>"{}"<|call|>', ("", "", [("f", {})])),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>x<|call|>", ("", "x", [])),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
     ("", "a\n\nb", [])),
    ("gemma4", '<|channel>thought\nhm\n<channel|>Hi<|tool_call>call:f{a:-4,s:<|"|>x{y:"<|"|>,o:{k:[1.5,true,null]}}'
     "<tool_call|><|tool_call>call:g{}<tool_call|>",
     ("hm", "Hi", [("f", {"a": -4, "s": 'x{y:"', "o": {"k": [1.5, True, None]}}), ("g", {})])),
    ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", ("", "<|tool_call>call:f{a:}<tool_call|>", [])),
    ("gemma4", "<|tool_call>call:f{a:1,b:}<tool_call|>", ("", "b:}", [("f", '{"a": 1')])),
    ("gemma4", '<|tool_call>call:f{s:[<|"|>a,b}<|"|>,{x:1}],t:<|"|><|"|>}x<tool_call|>',
     ("", "x", [("f", {"s": ["a,b}", {"x": 1}], "t": ""})])),
    ("functiongemma", "<start_function_call>call:f{s:<escape>a, b<escape>}<end_function_call>",
     ("", "", [("f", {"s": "a, b"})])),
    ("lfm2", '<|tool_call_start|>[f(a=1), g(s="x")]<|tool_call_end|>Done.',
     ("", "Done.", [("f", {"a": 1}), ("g", {"s": "x"})])),
    ("lfm2", "<|tool_call_start|>[f(s='a \"b\nc\", \\'d\\n', a=1)]<|tool_call_end|>",
     ("", "", [("f", {"s": 'a "b\nc", \'d\n', "a": 1})])),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", ("", "<|tool_call_start|>[f(1)]<|tool_call_end|>", [])),
    ("granite", '<think>a</think><response>b</response><|tool_call|>[{"name": "f", "arguments": {}}]',
     ("a", "b", [("f", {})])),
    ("ernie", '<think>\na\n</think>\n\n<response>\nHi <b>\n</response>\n\n'
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
     ("a", "Hi <b>", [("f", {})])),
    ("ernie", "a\n</response>\n", ("", "a", [])),
    ("seed_oss", "<seed:think>hm</seed:think>Hi\n<seed:tool_call>\n<function=f>\n<parameter=a>7</parameter>\n"
     "<parameter=s>\n1</parameter>\n</function>\n</seed:tool_call>", ("hm", "Hi", [("f", {"a": 7, "s": "\n1"})])),
    ("seed_oss", "<seed:tool_call><function=f><parameter=l>[{'k': True, 'n': None}]</parameter></function>"
     "</seed:tool_call>", ("", "", [("f", {"l": [{"k": True, "n": None}]})])),
    ("seed_oss", "<seed:tool_call><function=f><parameter=l>[{1, 2}]</parameter></function></seed:tool_call>",
     ("", "", [("f", {"l": "[{1, 2}]"})])),
    ("nemotron", '<think>hm</think><TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
     "</TOOLCALL>", ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("cohere", '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", '
     '"parameters": {"a": 1}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
     ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", ("hm", "Hi", [])),
    ("apertus", 'Hi<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
     ("", "Hi", [("f", {"a": 1}), ("g", {})])),
    ("apertus", '<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{"f": 1}]<|tools_suffix|>',
     ("hm", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', [])),
    ("apriel", 'Hi\n<tool_calls>[{"name": "f", "arguments": {"a": 1}, "id": "x"}]</tool_calls>',
     ("", "Hi", [("f", {"a": 1})])),
    ("functionary", '<function=f>{"a": 1}</function><function=g>{}</function>', ("", "", [("f", {"a": 1}), ("g", {})])),
    ("functionary", "<function=f>\n<parameter=a>1</parameter></function>",
     ("", "<function=f>\n<parameter=a>1</parameter></function>", [])),
    ("deepseek_v3_2", 'hm</think>Hi\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
     'name="s" string="true">1\n</｜DSML｜parameter>\n<｜DSML｜parameter name="l" string="false">'
     '["</｜DSML｜parameter>"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
     ("", "hm</think>Hi", [("f", {"s": "1\n", "l": ["</｜DSML｜parameter>"]}), ("g", {})])),
    ("deepseek_v3_2", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1',
     ("", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1', [])),
    ("deepseek_v4", '<think>hm</think>Hi<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="u" '
     'string="false">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
     ("hm", "Hi", [("f", {"u": None})])),
    ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="u" string="false">x'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", ("", "", [("f", {"u": "x"})])),
    ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
     '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a&quot;b" type="string"<|sep|>1'
     '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|><|close|>call'
     '<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
     ("hm", "Hi", [("f", {'a"b': "1", "n": 1.5}), ("g", {})])),
    ("kimi_k3", '<|open|>think<|sep|>hm<|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|>'
     "<|close|>tools<|sep|>", ("hm", "", [("g", {})])),
    ("kimi_k3", "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>", ("", "Hi", [])),
    ("minimax_m3", '<mm:think>hm</mm:think>Hi]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>7'
     "]<]minimax[>[</a>]<]minimax[>[<s>1]<]minimax[>[<b>]<]minimax[>[</s>]<]minimax[>[<l>]<]minimax[>[<item>x"
     "]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<l>true]<]minimax[>[</l>]<]minimax[>[</item>"
     "]<]minimax[>[</l>]<]minimax[>[</invoke>\n"
     ']<]minimax[>[<invoke name="g">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
     ("hm", "Hi", [("f", {"a": 7, "s": "1]<]minimax[>[<b>", "l": ["x", {"l": True}]}), ("g", {})])),
    ("minimax_m3", "</mm:think>Hi", ("", "Hi", [])),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<l>]<]minimax[>[</l>'
     "]<]minimax[>[<u>]<]minimax[>[<x>1]<]minimax[>[</x>y]<]minimax[>[</u>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
     ("", "]<]minimax[>[<x>1]<]minimax[>[</x>y]<]minimax[>[</u>]<]minimax[>[</invoke>", [("f", '{"l": []')])),
    ("solar_open", '<|think|>hm<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>call_1<|tool_call:name|>f'
     '<|tool_call:args|>{"a": 1}<|tool_call:end|><|tool_call:begin|>x<|tool_call:name|>g<|tool_call:args|>{}'
     "<|tool_call:end|><|calls|>", ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("solar_open", "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>", ("hm", "Hi", [])),
    ("minicpm5", '<think>hm</think>Hi\n<function name="f"><param name="a">7</param><param name="s">'
     '<![CDATA[a</param>\n<b]]></param></function><function name="g"></function>',
     ("hm", "Hi", [("f", {"a": 7, "s": "a</param>\n<b"}), ("g", {})])),
    ("minicpm5", '<function name="f"><param name="s"><![CDATA[a</param></function>',
     ("", '<function name="f"><param name="s"><![CDATA[a</param></function>', [])),
    ("gigachat3", 'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
     ("", "Hi", [("f", {"a": 1})])),
    ("gigachat3", "Hi, a function call", ("", "Hi, a function call", [])),
    ("gigachat3_1", 'Hi<|function_call|>{"name": "f", "arguments": {"a": 1}}', ("", "Hi", [("f", {"a": 1})])),
    ("none", '<think>a</think><tool_call>{"name": "f"}</tool_call>',
     ("a", '<tool_call>{"name": "f"}</tool_call>', [])),
    # A call that a thought has not ended before: one of a function that there is.
    ("hermes", '<think>hm\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n</think>\n\nx',
     ("hm", "x", [("f", {"a": 1})])),
    ("hermes", '<think>a <tool_call> tag, b <tool_call>{"name": "g", "arguments": {}}</tool_call> c</think>d',
     ('a <tool_call> tag, b <tool_call>{"name": "g", "arguments": {}}</tool_call> c', "d", [])),
    ("hermes", '<think>a <tool_call>{"name": "f"</think>d', ('a <tool_call>{"name": "f"', "d", [])),
    ("hermes", '<think>a <tool_call>{"name": "f"', ('a <tool_call>{"name": "f"', "", [])),
    ("hermes", '<think>a<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</think>d',
     ("a", "d", [("f", {"s": "</think>"})])),
    ("qwen3_coder", "<think>a\n<tool_call>\n<function=f>\n<parameter=s>\n</think>\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
     ("a", "", [("f", {"s": "</think>"}), ("f", {})])),
    ("qwen3_coder", "<think>a <tool_call><function=g></function></tool_call> b</think>c",
     ("a <tool_call><function=g></function></tool_call> b", "c", [])),
    ("glm", "<think>a <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
     ("a", "", [("f", {"a": 1})])),
    ("glm", "<think>a <tool_call> format of b</think>c", ("a <tool_call> format of b", "c", [])),
    ("minimax", '<think>a<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call></think>b',
     ("a", "b", [("f", {})])),
    ("kimi", "<think>a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
     "<|tool_call_end|><|tool_calls_section_end|></think>b", ("a", "b", [("f", {})])),
    ("llama3", '<think>a</think>\n\n{"name": "f", "parameters": {"a": 1}}', ("a", "", [("f", {"a": 1})])),
    ("llama3", "<think>a</think>[f(a=1)]", ("a", "", [("f", {"a": 1})])),
    ("llama3", "<think>a</think>[1]", ("a", "[1]", [])),
    # Calls whose first mark, or another tag, is left out.
    ("qwen3_coder", "Hi\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=f>\n</function>\n</tool_call>", ("", "Hi", [("f", {"a": 7}), ("f", {})])),
    ("qwen3_coder", "<think>a<function=f><parameter=a>7</parameter></tool_call>", ("a", "", [("f", {"a": 7})])),
    ("qwen3_coder", "the tag <function=g> and </function>.", ("", "the tag <function=g> and </function>.", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=a>\n7\n</parameter>\n</tool_call>",
     ("", "", [("f", {"s": "x", "a": 7})])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=b>\n7\n</parameter>\n</tool_call>",
     ("", "", [("f", {"s": "x\n<parameter=b>\n7"})])),
    ("seed_oss", "<function=f><parameter=s>x</parameter></function></seed:tool_call>.", ("", ".", [("f", {"s": "x"})])),
    ("minimax", '<invoke name="f"><parameter name="a">1</parameter></invoke>', ("", "", [("f", {"a": 1})])),
    ("llama3", '<function=f>{"a": 1}</function>', ("", "", [("f", {"a": 1})])),
    ("deepseek_v3_2", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", ("", "", [("f", {"a": 1})])),
    # Marks within strings and arguments, and strings that have no end.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a </tool_call> b\n<tool_call>\t\\n"}}</tool_call>',
     ("", "", [("f", {"s": "a </tool_call> b\n<tool_call>\t\n"})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
     ("", "", [("f", '{"s": "a'), ("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>\n', ("", "", [("f", '{"s": "a')])),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>a</tool_call>\n<tool_call></function></parameter></function>"
     "</tool_call>", ("", "<tool_call><function=f><parameter=s>a</tool_call>\n<tool_call></function></parameter>"
     "</function></tool_call>", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n</tool_call> </function> <function=f>\n</parameter>\n"
     "</function>\n</tool_call>", ("", "", [("f", {"s": "</tool_call> </function> <function=f>"})])),
    ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>a <tool_call> </tool_call> b</arg_value></tool_call>",
     ("", "", [("f", {"s": "a <tool_call> </tool_call> b"})])),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<u>{"]<]minimax[>[</u>": 1}'
     "]<]minimax[>[</u>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
     ("", "", [("f", {"u": {"]<]minimax[>[</u>": 1}})])),
    # Other words for values and names.
    ("gemma4", '<|tool_call>call:f{s:Paris, at 9:30, or "so",a:+3,o:{x:b c,y:"d\\n}"},l:[e f,1]}<tool_call|>',
     ("", "", [("f", {"s": 'Paris, at 9:30, or "so"', "a": 3, "o": {"x": "b c", "y": "d\n}"}, "l": ["e f", 1]})])),
    ("gemma4", '<|tool_call>call:f{"s":5,a:1e999,n:1e999,t:"a, b:c",u:True}<tool_call|>',
     ("", "", [("f", {"s": "5", "a": "1e999", "n": "1e999", "t": "a, b:c", "u": True})])),
    ("gemma4", "<|tool_call>call:f{s:a<b,a:1}<tool_call|>", ("", "", [("f", {"s": "a<b", "a": 1})])),
    ("gemma4", '<|tool_call>call:f{s:"a}<tool_call|>', ("", '<|tool_call>call:f{s:"a}<tool_call|>', [])),
    ("lfm2", "<|tool_call_start|>[get-weather(from='Rome', in=True)]<|tool_call_end|>",
     ("", "", [("get-weather", {"from": "Rome", "in": True})])),
    ("llama3", '[f(s="x", class=1e999)]', ("", "", [("f", {"s": "x", "class": "1e999"})])),
    ("kimi", "<|tool_call_begin|>functions_f_1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("f", {})])),
    ("kimi", "<|tool_call_begin|>functionsf1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("f", {})])),
    ("kimi", "<|tool_call_begin|>g_1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("g_1", {})])),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>', ("", "", [("f", {"a": "1e999"})])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>",
     ("", "", [("f", {"a": "1e999"})])),
]
