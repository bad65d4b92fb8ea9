"""--chat-template: a file or the template itself, in place of the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.launch.chat_template import with_template
from tests.fakes.written import byte_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


def test_a_file_or_the_text_itself_replaces_the_models_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    tokenizer = byte_tokenizer("model's")
    for given in (str(file), TEMPLATE):
        tokenizer.chat_template = "model's"
        assert with_template(tokenizer, given) is tokenizer
        chat = [{"role": "user", "content": "é"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "[é]"
    assert with_template(tokenizer, "") is tokenizer
    assert tokenizer.chat_template == TEMPLATE


def test_a_template_that_refuses_some_chats_is_none_the_worse() -> None:
    template = "{{ raise_exception('a system message is missing') }}"
    tokenizer = byte_tokenizer()
    with_template(tokenizer, template)
    assert tokenizer.chat_template == template


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("/nowhere/chat.jinja", "No such file"),
        ("{% for %}", "line 1: "),
        ("{{ a }}\n{% if %}", "line 2: "),
    ],
)
def test_what_is_wrong_is_named(given: str, part: str) -> None:
    with pytest.raises(MisuseError, match="--chat-template") as caught:
        with_template(byte_tokenizer(), given)
    assert part in str(caught.value)


def test_a_template_needs_a_tokenizer() -> None:
    assert with_template(None, "") is None
    with pytest.raises(MisuseError, match="no tokenizer"):
        with_template(None, TEMPLATE)
