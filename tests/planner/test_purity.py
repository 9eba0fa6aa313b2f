"""The planner is pure: the standard library, itself, and numpy where much is counted."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import shadowlane.planner

FILES = sorted(Path(shadowlane.planner.__file__).parent.glob("*.py"))
NUMERIC = {
    "routing",
    "routing_files",
    "experts",
    "chooser",
    "heat",
    "following",
    "expert_sim",
    "hybrid_search",
    "recorded_hits",
}  # files that may use numpy
IMPURE = {"time", "random", "os", "threading", "asyncio", "socket", "subprocess", "datetime"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_nothing_else(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
            if names == ["random"] and [alias.name for alias in node.names] == ["Random"]:
                continue  # a generator with a seed of its own is as pure as a list
        else:
            continue
        for name in names:
            is_own = name.startswith("shadowlane.planner")
            is_pure = name.split(".")[0] in sys.stdlib_module_names and name not in IMPURE
            is_numeric = name.split(".")[0] == "numpy" and path.stem in NUMERIC
            assert is_own or is_pure or is_numeric, f"{path.name} imports {name}"
