"""What a request may bring: prompts, token ids, messages and parameters, in the form that is sent.

Refused here is what has the wrong form, with its place. Whether a model knows a role is for its
chat template to say: many have roles of their own, `tool` or `developer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from shadowlane.arguments import shown
from shadowlane.ops.sampling import SamplingParams


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as texts and lists of ids. Raises ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    many = _listed(prompts)
    if many is None:
        raise ValueError(f"a prompt must be a text or a list of ids; got {shown(prompts)}")
    if many and is_id(many[0]):
        return [as_ids(many)]
    return [as_prompt(each) for each in many]


def as_prompt(prompt: Any) -> str | list[int]:
    """One text or list of ids."""
    if isinstance(prompt, str):
        return prompt
    if _listed(prompt) is None:
        raise ValueError(f"a prompt must be a text or a list of ids; got {shown(prompt)}")
    return as_ids(prompt)


def is_id(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def as_ids(token_ids: Any) -> list[int]:
    listed = _listed(token_ids)
    if listed is None or not all(map(is_id, listed)):
        raise ValueError(f"token ids must be whole numbers; got {shown(token_ids)}")
    return [index(token) for token in listed]


def as_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, as dicts that can be sent.

    Each has a role and a content, both texts; one that calls tools needs no content. Other keys are
    the template's. Raises ValueError naming the message by its place.
    """
    listed = [messages] if isinstance(messages, Mapping) else _listed(messages)
    if listed is None:
        raise ValueError(
            f"messages must be dicts with role and content, in a list; got {shown(messages)}"
        )
    if not listed:
        raise ValueError("messages must hold at least one; got none")
    for place, message in enumerate(listed):
        _check_message(f"messages[{place}]", message)
    return [dict(message) for message in listed]


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a dict with role and content; got {shown(message)}")
    calls_tools = bool(message.get("tool_calls"))
    for key in ("role", "content"):
        value = message.get(key)
        if key == "content" and value is None and calls_tools:
            continue
        if key not in message:
            keys = ", ".join(map(str, message)) or "no keys"
            raise ValueError(f"{name} must have a {key}; got {keys}")
        if not isinstance(value, str):
            raise ValueError(f"{name} must have a text as {key}; got {shown(value)}")
    if not message["role"]:
        raise ValueError(f"{name} must have a text as role; got ''")


def checked_params(params: Any) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams; got {shown(params)}")
    return params or SamplingParams()


def _listed(value: Any) -> list[Any] | None:
    """The members of a list, a tuple, an array; None for one thing, and for texts and dicts."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        return None
