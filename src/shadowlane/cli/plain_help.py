"""Help that shows what a value is for, `SIZE` or `q8_0|q4_0`, and nothing where none is given."""

from __future__ import annotations

from typing import Any


class PlainHelp:
    """Mixed into commands: typer alone shows `<bool>` after a switch and `<str>` after a name.

    Every option that takes a value names it in `metavar`; an argument's name says it all.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if each.param_type_name == "argument" or each.is_flag:
                each.display_type_rich = _no_type
        return params


def _no_type(ctx: Any) -> None:
    return None
