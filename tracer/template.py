"""A model's own chat template (Jinja), as its server renders it.

Named as in Hugging Face tokenizers: https://huggingface.co/docs/transformers/chat_templating. A template is a program from
a model's author, so it runs in a sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tracer.errors import TraceError


class ChatTemplate:
    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: bos_token, eos_token, ... as text. Raises jinja2.TemplateError for what is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """The prompt up to the opening of the answer. Raises jinja2.TemplateError, or whatever the template's code raises."""
        return self._template.render(
            messages=[_with_plain_text(one) for one in messages], tools=tools, add_generation_prompt=True, **self._special
        )


def load_template(folder: Path) -> ChatTemplate | None:
    """Of a model folder: `chat_template.jinja`, or the field of `tokenizer_config.json`; None where it has neither."""
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    try:
        if path.is_file():
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        source, beside = config.get("chat_template"), folder / "chat_template.jinja"
        if beside.is_file():
            path, source = beside, beside.read_text("utf-8")
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if one.get("name") == "default"), None)
        return ChatTemplate(source, _special_tokens(config)) if isinstance(source, str) else None
    except (msgspec.DecodeError, UnicodeDecodeError, TemplateError, OSError) as error:
        raise TraceError("cannot read the chat template", path=str(path), seen=str(error)) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _with_plain_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parts that are all text become one string, as servers do for templates that expect one."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Without Jinja's escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
