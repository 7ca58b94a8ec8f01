"""The renderer: ids in, ids out, append-only, for every kind of chat template."""

import json
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.envs.messages import assistant, assistant_call, tool_result, user
from rollstream.envs.renderer import Renderer
from rollstream.errors import TemplateError
from rollstream.models import build_tiny_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "Look up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call><|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

FORGETFUL = """\
{%- set found = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set found.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < found.last %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A template that drops the reasoning of turns before the last question, as hybrid reasoning models do."""

MOVING = FORGETFUL.replace("{{- '<|im_start|>' + message.role", "{{- ('[TOOLS]' if loop.index0 == found.last else '') + '<|im_start|>' + message.role")
"""A template that lists the tools before the last question."""

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>")

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen split text into words: newlines end a word, so no merge reaches from a generation prompt into an answer."""


@cache
def bpe(template, eos="<|endoftext|>"):
    """A byte-level BPE tokenizer with real merges and ``template``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(['assistant\n\nassistant\nuser\n\nthe key is\n\n\n{"name": "get", "arguments": {"key": "b"}}\n'] * 20, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin|>", eos_token=eos, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny():
    return build_tiny_tokenizer(4096)


FAMILIES = {
    "tiny": (tiny, TOOLS),
    "tiny without tools": (tiny, []),
    "chatml": (lambda: bpe(CHATML), TOOLS),
    "chatml without tools": (lambda: bpe(CHATML), []),
    "llama": (lambda: bpe(LLAMA, "<|eot_id|>"), []),
    "forgetful, tool loop": (lambda: bpe(FORGETFUL), TOOLS),
}


@cache
def family(name):
    make_tokenizer, tools = FAMILIES[name]
    return make_tokenizer(), Renderer(make_tokenizer(), tools), tools


def whole(tokenizer, tools, messages, prompt):
    text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt)
    return tokenizer.encode(text, add_special_tokens=False)


words = st.text(st.sampled_from('ab z\n0"\\é字{}'), max_size=8).map(lambda text: text.strip())
calls = st.lists(st.fixed_dictionaries({"key": words}), min_size=1, max_size=2)


@st.composite
def conversations(draw, with_tools, with_questions=True):
    """Alternating messages: first what the environment says, then a turn of the policy, and so on."""
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    messages.append(user(draw(words)))
    for _ in range(draw(st.integers(1, 4))):
        if with_tools and (not with_questions or draw(st.booleans())):
            message = assistant(draw(words))
            message["tool_calls"] = [
                {"id": f"call_{index}", **assistant_call("get", **arguments)["tool_calls"][0]} for index, arguments in enumerate(draw(calls))
            ]
            messages += [message, *(tool_result(draw(words), call) for call in message["tool_calls"])]
        else:
            messages += [assistant(draw(words)), user(draw(words))]
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_appended_ids_are_those_of_the_whole_conversation(name, data):
    tokenizer, renderer, tools = family(name)
    messages = data.draw(conversations(bool(tools), with_questions="forgetful" not in name))
    ids, rest, sampled = None, list(messages), False
    while rest:
        said = []
        while rest and rest[0]["role"] != "assistant":
            said.append(rest.pop(0))
        grown = renderer.initial(said) if ids is None else ids + renderer.extend(said, closed=True)
        assert ids is None or grown[: len(ids)] == ids
        ids = grown
        assert ids == whole(tokenizer, tools, messages[: len(messages) - len(rest)], prompt=True)
        if rest:
            with_answer = whole(tokenizer, tools, [*messages[: len(messages) - len(rest)], rest[0]], prompt=False)
            turn = with_answer[len(ids) :]
            end = max(index for index, token in enumerate(turn) if token in renderer.stop_ids)
            turn, sampled = turn[: end + 1], True
            understood = renderer.parse(turn)
            assert [call["function"] for call in understood.get("tool_calls", [])] == [call["function"] for call in rest[0].get("tool_calls", [])]
            assert understood["content"].strip() == rest[0]["content"].strip()
            ids = ids + turn
            rest.pop(0)
    assert sampled


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_scripted_conversation_trains_exactly_what_a_policy_samples(name, data):
    tokenizer, renderer, tools = family(name)
    messages = data.draw(conversations(bool(tools), with_questions="forgetful" not in name))
    while messages[-1]["role"] != "assistant":
        messages.pop()
    ids, mask = renderer.conversation(messages)
    assert len(ids) == len(mask)
    rendered = whole(tokenizer, tools, messages, prompt=False)
    assert rendered[: len(ids)] == ids
    assert mask[-1] == 1
    assert ids[-1] in renderer.stop_ids
    trained = [renderer.parse(run) for run in runs(ids, mask)]
    answers = [message for message in messages if message["role"] == "assistant"]
    assert [message["content"].strip() for message in trained] == [message["content"].strip() for message in answers]
    assert all(run[-1] in renderer.stop_ids for run in runs(ids, mask))


def runs(ids, mask):
    found, current = [], []
    for token, trained in zip([*ids, None], [*mask, 0], strict=True):
        if trained:
            current.append(token)
        elif current:
            found.append(current)
            current = []
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_gets_its_end_from_us(name):
    _, renderer, tools = family(name)
    said = [tool_result("5", assistant_call("get", key="b")["tool_calls"][0])] if tools else [user("go on")]
    closed, cut = renderer.extend(said, closed=True), renderer.extend(said, closed=False)
    assert cut[1:] == closed
    assert cut[0] in renderer.stop_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_tokens_that_are_not_canonical_change_nothing_after_them(name):
    _, renderer, _ = family(name)
    said = [user("go on")] if "forgetful" not in name else [tool_result("5", assistant_call("get", key="b")["tool_calls"][0])]
    first = renderer.extend(said, closed=True)
    renderer.parse([65, 66, 5])
    again = renderer.extend(said, closed=True)
    assert again == first
    again.append(0)
    assert renderer.extend(said, closed=True) == first, "the answer is the caller's to change"


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_page_that_cannot_fit_only_as_much_is_tokenized_as_shows_it(name, monkeypatch):
    tokenizer, renderer, tools = family(name)
    page = "all work and no play " * 3_000
    said = [tool_result(page, assistant_call("get", key="b")["tool_calls"][0])] if tools else [user(page)]
    whole, first = renderer.extend(said, closed=True), renderer.initial([user(page)])
    encode, lengths = tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: lengths.append(len(text)) or encode(text, **options))
    assert renderer.extend(said, closed=True, limit=len(whole)) == whole
    assert renderer.initial([user(page)], limit=40)[:40] == first[:40]
    lengths.clear()
    assert len(renderer.extend(said, closed=True, limit=40)) > 40
    assert max(lengths) < len(page) / 10


def test_the_tiny_template_renders_one_special_token_per_role():
    tokenizer, renderer, _ = family("tiny")
    assert tokenizer.decode(renderer.initial([user("get b")])) == "<|user|>get b<|end|><|assistant|>"
    call = assistant_call("get", key="b")
    ids, mask = renderer.conversation([user("get b"), call, tool_result("7", call["tool_calls"][0]), assistant("7")])
    assert tokenizer.decode(ids) == '<|user|>get b<|end|><|assistant|><|call|>get(key="b")<|end|><|tool|>7<|end|><|assistant|>7<|end|>'
    assert tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == '<|call|>get(key="b")<|end|>7<|end|>'


def test_stop_tokens_are_the_end_of_turn_and_the_end_of_text():
    tokenizer, renderer, _ = family("chatml")
    assert renderer.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")}


def test_a_call_nobody_can_read_is_marked():
    tokenizer, renderer, _ = family("tiny")
    message = renderer.parse(tokenizer.encode("<|call|>get(key=<|end|>", add_special_tokens=False))
    assert "malformed call 'get(key='" in message["malformed"]
    assert renderer.parse([])["content"] == ""
    assert renderer.parse([255, 128, 10_000])["role"] == "assistant", "bytes that are no text, ids beyond the vocabulary"


def test_a_template_that_drops_earlier_reasoning_is_refused_where_it_would_rewrite():
    _, renderer, _ = family("forgetful, tool loop")
    assert renderer.extend([tool_result("5", assistant_call("get", key="b")["tool_calls"][0])], closed=True)
    with pytest.raises(TemplateError, match="drops earlier reasoning once user follows"):
        renderer.extend([user("and now?")], closed=True)


@pytest.mark.parametrize(
    ("template", "tools", "error"),
    [
        (None, [], "no chat template"),
        (LLAMA, TOOLS, "tool calls in a format that is not known here"),
        (LLAMA.replace("{%- if add_generation_prompt %}", "{%- if add_generation_prompt %}{{- '<think>' }}"), [], "does not follow its generation prompt"),
        (LLAMA.replace("'<|eot_id|>'", "'\\n'"), [], "no end-of-turn token after an answer"),
        (CHATML.replace("message.role == 'tool'", "message.role == 'function'"), TOOLS, "leaves out the content of tool"),
        (CHATML.replace("message.role == 'tool'", "raise_exception('no tools here')"), TOOLS, "refuses a conversation of user, assistant, tool"),
        ("{{- 'long' if messages | length > 2 }}" + LLAMA, [], "not append-only: user after an answer changes what came before"),
        (MOVING, TOOLS, "not append-only: user after an answer changes what came before"),
        (LLAMA + "{{ undefined.attribute }}", [], "the chat template refuses a conversation of user: UndefinedError"),
    ],
)
def test_a_template_that_cannot_be_extended_is_refused_clearly(template, tools, error):
    with pytest.raises(TemplateError) as caught:
        Renderer(bpe(template), tools)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "error"), [([], "no assistant message"), ([user("a")], "no assistant message"), ([assistant("a")], "nothing said before")]
)
def test_a_script_that_cannot_be_learnt_from_is_refused(messages, error):
    _, renderer, _ = family("tiny")
    with pytest.raises(TemplateError, match=error):
        renderer.conversation(messages)


def test_arguments_as_json_text_render_as_the_object_they_are():
    tokenizer, renderer, _ = family("tiny")
    call = assistant_call("get")
    call["tool_calls"][0]["function"]["arguments"] = json.dumps({"key": "b"})
    ids, _ = renderer.conversation([user("get b"), call])
    assert tokenizer.decode(ids).endswith('<|call|>get(key="b")<|end|>')
