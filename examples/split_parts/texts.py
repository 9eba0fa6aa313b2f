"""Texts that are on any machine that runs this: to look at neurons at work, no network needed."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

import torch

from shadowlane.ops.errors import ModelError
from shadowlane.ops.tokenizer import Tokenizer

_MODULES = ("statistics", "textwrap", "heapq", "fractions", "random", "json.decoder")
# What SmolLM2-135M-Instruct (Apache-2.0) answered to 48 questions, at temperature 0.7: the everyday
# English that no operating system has, in the form of a conversation.
_ANSWERS = Path(__file__).with_name("answers.txt")
# None of GNU's: their texts share whole paragraphs, and GPL-3 is what results are measured on.
_LICENCES = ("Apache-2.0", "MPL-1.1", "Artistic", "MPL-2.0")
_LICENCE_FOLDERS = (Path("/usr/share/common-licenses"), Path(__file__).parents[2])


def calibration_texts(files: Sequence[Path]) -> list[str]:
    """The texts in `files`; without any: answers, Python's reference, its library and licences."""
    if files:
        return [path.read_text() for path in files]
    reference = "\n\n".join(pydoc_data.topics.topics.values())
    sources = [
        Path(spec.origin).read_text()
        for spec in map(importlib.util.find_spec, _MODULES)
        if spec is not None and spec.origin is not None
    ]
    paths = [_LICENCE_FOLDERS[0] / name for name in _LICENCES]
    licences = [path.read_text() for path in paths if path.exists()]
    if not licences:
        licences = [(_LICENCE_FOLDERS[1] / "LICENSE").read_text()]
    return [_ANSWERS.read_text(), reference, "\n".join([*sources, *licences])]


def cut_windows(
    texts: Sequence[str], tokenizer: Tokenizer, num_windows: int, window: int
) -> torch.Tensor:
    """About `num_windows` windows, as many of each text as there are, spread evenly over it.

    Returns token ids [windows, window]. Raises ModelError where the texts fill no window.
    """
    parts = []
    left = num_windows
    by_length = sorted((tokenizer.encode(text) for text in texts), key=len)
    for number, ids in enumerate(by_length):  # what a short text lacks, longer ones make up for
        whole = len(ids) // window
        taken = min(whole, round(left / (len(by_length) - number)))
        windows = torch.tensor(ids[: whole * window]).view(whole, window)
        parts.append(windows[torch.linspace(0, max(whole - 1, 0), taken).long()])
        left -= taken
    found = torch.cat(parts)
    if not len(found):
        raise ModelError(f"the texts must have at least {window} tokens; they have fewer")
    return found
