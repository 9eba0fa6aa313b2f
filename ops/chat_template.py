"""Renders a model's chat template, in a sandbox, with what transformers gives such templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shadowlane.ops.errors import ModelError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@cache
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"chat_template must be a valid Jinja template: {error}") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """The text of a conversation.

    `special_tokens` are names and texts, `{"bos_token": "<s>"}`, as templates use them. Raises
    ValueError for messages of the wrong form or that the template refuses, ModelError for a
    template that does not compile.
    """
    if not messages:
        raise ValueError("messages must not be empty; got none")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages must be objects with a role; got {message!r:.80}")
    # Templates test for a key by its presence, so one without a value has to go.
    chat = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    try:
        return _compile(template).render(
            messages=chat,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"messages do not fit the model's chat template: {reason}") from error
