"""The chat template that is shipped for smollm2."""

from importlib.resources import files

from mainstem.text.chat_template import ChatTemplate

SHIPPED = (files("mainstem") / "data" / "smollm2_chat_template.jinja").read_text()
# the one in the model's own file
OWN = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # noqa: E501
SYSTEM = {"role": "system", "content": "be brief "}
USER = {"role": "user", "content": " hi\n"}
ANSWER = {"role": "assistant", "content": "ok "}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}},
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}],
}
RESULT = {"role": "tool", "content": "42"}


def test_prompts_without_tools_are_those_of_the_models_own_template() -> None:
    own, shipped = ChatTemplate(OWN, {}), ChatTemplate(SHIPPED, {})
    for chat in ([USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER], [USER, ANSWER]):
        for is_open in (True, False):
            wanted = own.render(chat, None, is_open, {})
            assert shipped.render(chat, None, is_open, {}) == wanted
            assert shipped.render(chat, [], is_open, {}) == wanted


def test_tools_calls_and_results_are_in_the_prompt() -> None:
    template = ChatTemplate(SHIPPED, {})
    assert template.reads_tools
    prompt = template.render([SYSTEM, USER, CALL, RESULT], [TOOL], True, {})
    begin, *turns = prompt.split("<|im_start|>")[1:]
    assert begin.startswith("system\nbe brief \n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in begin
    assert turns == [
        "user\n hi\n<|im_end|>\n",
        'assistant\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n',
        "user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]
