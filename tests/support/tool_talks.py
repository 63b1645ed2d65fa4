"""Conversations in which tools are used, a template that writes them, and edits that clear results."""

TOOLS = "clear_tool_uses_20250919"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def call(id, name="find", arguments='{"at": "here now"}'):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content, *calls, **more):
    return {"role": "assistant", "content": content, **more} | ({"tool_calls": [*calls]} if calls else {})


def result(id, words=20):
    return {"role": "tool", "tool_call_id": id, "content": f"{id} " + "w " * (words - 1)}


def uses(names, words=20, thoughts=False):
    """A conversation in which tools are used, one by one; a use has a letter of `names` for its tool."""
    found = [{"role": "user", "content": "go"}]
    for number, name in enumerate(names):
        more = {"reasoning_content": f"hm {number}"} if thoughts else {}
        found += [said(f"step {number}", call(f"c{number}", name), **more), result(f"c{number}", words)]
    return found


def tools(**fields):
    return {"type": TOOLS, **fields}


def at(kind, value):
    return {"type": kind, "value": value}
