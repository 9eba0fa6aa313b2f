"""The error a person may cause: bad model files, bad configuration, a budget that cannot hold."""

from __future__ import annotations


class ModelError(Exception):
    """One line that names what is wrong, the rule and the value; the command line exits with 2.

    The message may quote names found in damaged files, so line breaks are folded into spaces here,
    once, and whoever prints it can rely on one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
