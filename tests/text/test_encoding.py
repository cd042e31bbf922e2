"""Prompts before they are encoded as token ids."""

import pytest

from mainstem.core.errors import InvalidRequest
from mainstem.text.encoding import App, Chat, Message, begin_prompt
from tests.fake_engines import TEMPLATE, a_tokenizer

TRIMMING = TEMPLATE.replace("m['content']", "m['content'] | trim")
GO: Message = {"role": "user", "content": "go"}


def rendered(content: object, template: str = TEMPLATE, app: App | None = None) -> str | None:
    messages: list[Message] = [GO, {"role": "assistant", "content": content}]
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    return begin_prompt(a_tokenizer(template), chat, app).text


def test_the_text_ends_with_the_message_that_is_continued() -> None:
    assert rendered(" on and on ") == "<user>go\n<assistant> on and on "
    assert rendered("on\n") == "<user>go\n<assistant>on\n"
    app = App("a", "Be brief.")
    assert rendered("on", app=app) == "<system>Be brief.\n<user>go\n<assistant>on"


def test_a_template_that_trims_also_trims_the_continued_message() -> None:
    assert rendered(" on and on ", TRIMMING) == "<user>go\n<assistant>on and on"


def test_a_template_may_trim_and_write_a_space_of_its_own() -> None:
    """Llama 2's template does: the answer is stripped, with one space before and after it."""
    spaced = TEMPLATE.replace("m['content']", "' ' + m['content'].strip() + ' '")
    assert rendered(" on and on ", spaced) == "<user> go \n<assistant> on and on"


@pytest.mark.parametrize(
    ("trim", "content", "left"),
    [
        ("strip(' ')", "on\n ", "on\n"),
        ("strip('\\n')", "on \n", "on "),
        ("strip('\\n')", "on ", "on "),
        ("rstrip('\\n ')", "on \n", "on"),
    ],
)
def test_a_template_may_trim_only_some_kinds_of_space(trim: str, content: str, left: str) -> None:
    """What is left is what the template prints of a message that is not continued."""
    template = TEMPLATE.replace("m['content']", f"m['content'].{trim}")
    assert rendered(content, template) == f"<user>go\n<assistant>{left}"
    chat = Chat([GO, {"role": "assistant", "content": content}], add_generation_prompt=False)
    whole = begin_prompt(a_tokenizer(template), chat, None).text
    assert whole == f"<user>go\n<assistant>{left}\n"


@pytest.mark.parametrize("content", ["", " ", None, 5])
def test_only_a_message_of_text_can_be_continued(content: object) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        rendered(content)


def test_a_template_must_contain_the_continued_message() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        rendered("x", "{{ messages[0]['content'] }}")


def test_messages_in_roles_that_a_template_does_not_know_are_not_dropped() -> None:
    known = "".join(f"{{% if m['role'] == '{role}' %}}{role}:{{{{ m['content'] }}}} {{% endif %}}"
                    for role in ("system", "user", "tool"))  # fmt: skip
    template = f"{{% for m in messages %}}{known}{{% endfor %}}"
    messages: list[Message] = [
        {"role": "developer", "content": "a"},
        GO,
        {"role": "function", "name": "f", "content": "b"},
    ]
    text = begin_prompt(a_tokenizer(template), Chat(messages), None).text
    assert text == "system:a user:go tool:b "
    of_developers = template.replace("system", "developer")
    text = begin_prompt(a_tokenizer(of_developers), Chat(messages), None).text
    assert text == "developer:a user:go tool:b "
    of_functions = template.replace("tool", "function")
    text = begin_prompt(a_tokenizer(of_functions), Chat(messages), None).text
    assert text == "system:a user:go function:b "


def test_a_tool_result_without_content_is_empty() -> None:
    result: Message = {"role": "tool", "tool_call_id": "c"}
    for given in (result, result | {"content": None}):
        messages: list[Message] = [GO, given]
        text = begin_prompt(a_tokenizer(TEMPLATE), Chat(messages), None).text
        assert text is not None
        assert text.startswith("<user>go\n<tool>\n")


def test_a_developer_message_is_appended_to_the_prompt_of_an_app() -> None:
    messages: list[Message] = [{"role": "developer", "content": "In French."}, GO]
    text = begin_prompt(a_tokenizer(TEMPLATE), Chat(messages), App("a", "Be brief.")).text
    assert text is not None
    assert text.startswith("<system>Be brief.\n\nIn French.\n<user>go")
