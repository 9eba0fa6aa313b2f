"""The error a person may cause: bad model files, bad configuration, a budget that cannot hold."""

from __future__ import annotations


class ModelError(Exception):
    """One line that names what is wrong, the rule and the value; the command line exits with 2.

    The message may quote names found in damaged files or directories. So line breaks are folded
    into spaces and what no terminal can show is escaped, here and once for all who print it.
    """

    def __init__(self, message: str) -> None:
        one_line = " ".join(message.splitlines())
        super().__init__(one_line.encode(errors="backslashreplace").decode())
