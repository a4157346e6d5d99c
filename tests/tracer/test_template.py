"""A model's own chat template decides where the prompt's tokens go, markers included."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tracer.errors import TraceError
from tracer.template import ChatTemplate, load_template
from tracer.tokens import encode_chat, load_tokenizer

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif -%}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
WORDS = ("hello", "world")
MARKERS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = HuggingFaceTokenizer(WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_folder_renders_with_its_own_template(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    messages = [{"role": "user", "content": "hello world"}]

    tokens = [token for part in encode_chat(tokenizer, messages) for token in part]

    assert tokenizer.decode(tokens).replace(" ", "") == "<s><|user|>helloworld</s><|assistant|>"
    assert tokens == [3, 6, 1, 2, 4, 7]
    assert load_tokenizer(str(model / "tokenizer.json")).template is None  # the bare file has none


def test_parts_of_text_and_tools_are_rendered(model: Path) -> None:
    template = load_template(model)
    assert template is not None
    content = [{"type": "text", "text": "a<b"}, {"type": "text", "text": "c"}]

    text = template.render([{"role": "user", "content": content}], tools=[{"name": "é<"}])

    assert text == '<s><|user|>a<b\nc</s>[{"name": "é<"}]<|assistant|>'


def test_a_template_can_refuse_and_cannot_reach_out() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]

    with pytest.raises(TemplateError, match="system must come first"):
        ChatTemplate(TEMPLATE, {}).render(messages)
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(messages)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, None),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}]}}, "x"),
        ({"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "new"}, "new"),
    ],
)
def test_where_templates_stand(tmp_path: Path, files: dict[str, Any], wanted: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    template = load_template(tmp_path)

    assert (template.render([]) if template is not None else None) == wanted


@pytest.mark.parametrize("content", ["{", '{"chat_template": "{% if %}"}'])
def test_a_broken_template_says_where(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)

    with pytest.raises(TraceError, match=r"cannot read the chat template.*|tokenizer_config\.json"):
        load_template(tmp_path)
