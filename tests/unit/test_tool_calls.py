"""Reading tool calls out of sampled text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.envs.tool_calls import json_blocks, parser_for, pythonic, read


def called(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|call|>get(key="b")', [("get", {"key": "b"})]),
        ("<|call|>get(key='b') ", [("get", {"key": "b"})]),
        ("<|call|>now()", [("now", {})]),
        ("<|call|>a(x=1)<|call|>b(y=-2.5, z=[1, {'k': null}])", [("a", {"x": 1}), ("b", {"y": -2.5, "z": [1, {"k": None}]})]),
        ("<|call|>f(a=true, b=False, c=None)", [("f", {"a": True, "b": False, "c": None})]),
    ],
)
def test_pythonic_calls_are_read(text, calls):
    assert called(read(f"so: {text}", pythonic, reasons=False)) == calls


def test_text_before_a_call_stays_content():
    message = read('I look.<|call|>get(key="b")', pythonic, reasons=False)
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["id"] == "call_0"


@pytest.mark.parametrize(
    "call",
    [
        "",
        "get",
        "get(",
        'get("b")',
        "get(**{'key': 'b'})",
        "get(*['b'])",
        "get(key=b)",
        "get(key=__import__('os').system('true'))",
        "get(key=1+1)",
        "get(key=(1, 2))",
        "get(key=b'x')",
        "get(key={**{}})",
        "get(key={'a', 'b'})",
        "get(key={[]: 1})",
        "a.b(c=1)",
        "get(key=1, key=2)",
        'get(key="b"); get(key="c")',
        "lambda: 0",
        "\x00",
        "get(x=" + "[" * 500 + "]" * 500 + ")",
        "get(x=" + "-" * 3000 + "1)",
        'get(key="\\d" 5)',
        "get(x=" + "9" * 5000 + ")",
        "get(x=1e999j)",
        'get(x="\\ud800")',
        'get(x=[{"\\udfff": 1}])',
    ],
)
def test_a_malformed_pythonic_call_is_marked_and_keeps_its_text(call):
    message = read(f"<|call|>{call}", pythonic, reasons=False)
    assert message["content"] == f"<|call|>{call}"
    assert "tool_calls" not in message
    assert "malformed call" in message["malformed"]
    assert len(message["malformed"]) < 140


@pytest.mark.parametrize(
    "call",
    [r'{"name": "get", "arguments": {"key": "\ud83d"}}', r'{"name": "g\udc00", "arguments": {}}', r'{"name": "get", "arguments": {"k": [{"\ud800": 1}]}}'],
)
def test_half_a_character_in_a_json_call_is_malformed_and_a_whole_pair_is_not(call):
    message = read(f"<tool_call>{call}</tool_call>", json_blocks, reasons=False)
    assert "half a character" in message["malformed"]
    message["malformed"].encode()
    assert called(read(r'<tool_call>{"name": "get", "arguments": {"key": "\ud83d\ude00"}}</tool_call>', json_blocks, reasons=False)) == [("get", {"key": "😀"})]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text() | st.text(alphabet="<|cal>get(key=\"b'),[]{}:1"))
def test_no_text_raises(text):
    for prefix, parser in (("<|call|>", pythonic), ("<tool_call>", json_blocks), ("", json_blocks)):
        assert read(prefix + text, parser, reasons=True)["role"] == "assistant"
    read(f"<tool_call>{text}</tool_call>", json_blocks, reasons=False)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["key", "x", "y"]), values))
def test_what_a_template_writes_is_read_back(arguments):
    import json

    written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    if "<|call|>" not in written:
        assert called(read(f"<|call|>get({written})", pythonic, reasons=False)) == [("get", arguments)]
    block = json.dumps({"name": "get", "arguments": arguments}, ensure_ascii=False)
    if "tool_call>" not in block:
        assert called(read(f"<tool_call>\n{block}\n</tool_call>", json_blocks, reasons=False)) == [("get", arguments)]


def test_json_calls_are_read_and_their_order_kept():
    text = 'Both.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    message = read(text, json_blocks, reasons=False)
    assert message["content"] == "Both."
    assert called(message) == [("a", {"x": 1}), ("b", {})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a"}',
        "<tool_call>{</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '{"name": "a"}</tool_call>',
    ],
)
def test_a_malformed_json_call_is_marked_and_keeps_its_text(text):
    message = read(text, json_blocks, reasons=False)
    assert message["content"] == text
    assert "malformed call" in message["malformed"]


def test_a_call_inside_the_reasoning_is_a_thought():
    message = read('<think>\nmaybe <tool_call>{"name": "a"}</tool_call>?\n</think>\n\nno', json_blocks, reasons=True)
    assert message == {"role": "assistant", "content": "no", "reasoning_content": 'maybe <tool_call>{"name": "a"}</tool_call>?'}


def test_reasoning_that_never_ends_leaves_no_answer():
    message = read("<think>\nhm, hm", json_blocks, reasons=True)
    assert (message["content"], message["reasoning_content"]) == ("", "hm, hm")


def test_the_template_tells_the_format():
    assert parser_for("… <|call|> …") is pythonic
    assert parser_for("… <tool_call> …") is json_blocks
    assert parser_for("… <tool_call>\n<function=…> …") is None
    assert parser_for("plain") is None
