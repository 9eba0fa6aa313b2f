"""What the documents say of the code, held against it: names, paths, links, examples and tables."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

from shadowlane.planner import events
from shadowlane.planner.trial import Settings

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SOURCES = ("planner", "ops", "actors", "src/shadowlane/cli", "benchmarks", "tests", "examples")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAME = r"[A-Za-z_]\w*"
FILE_ENDINGS = ("py", "md", "svg", "json", "yaml", "toml", "gguf", "safetensors")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    text = FENCE.sub("", page.read_text())
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def quoted(page: Path) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def files() -> tuple[Path, ...]:
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return (*found, *(ROOT / "src" / "shadowlane").glob("*.py"))


@cache
def words() -> frozenset[str]:
    """Every word of the sources, and of nothing else: this file would vouch for itself."""
    this = Path(__file__)
    return frozenset(
        word for path in files() if path != this for word in re.findall(r"\w+", path.read_text())
    )


@cache
def members() -> dict[str, set[str]]:
    """Class or module -> the names that are defined in it, and the attributes it sets."""
    found: dict[str, set[str]] = {}
    for path in files():
        tree = ast.parse(path.read_text())
        found.setdefault(path.stem, set()).update(defined_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(defined_in(node))
    return found


def defined_in(node: ast.Module | ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            names.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        elif isinstance(each, ast.Assign):
            names |= {name.id for name in ast.walk(each) if isinstance(name, ast.Name)}
    return names


def is_path(text: str) -> bool:
    """Whether it looks like a path of this repository."""
    if not re.fullmatch(r"[\w.<>*-]+(/[\w.<>*-]+)*/?", text):
        return False
    first = text.split("/")[0]
    is_below = "/" in text and first not in (".", ".venv") and (ROOT / first).is_dir()
    return is_below or text.endswith((".py", ".md", ".svg"))


def is_there(text: str, page: Path) -> bool:
    """A path from the root or from the page, or the bare name of some source file."""
    if (ROOT / text).exists() or (page.parent / text).exists():
        return True
    return "/" not in text and any(path.name == text for path in files())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    missing = [text for text in quoted(page) if is_path(text) and not is_there(text, page)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_code_exist(page: Path) -> None:
    """`Class.member` and `module.function`, and single names that look like those of code."""
    unknown = []
    for text in quoted(page):
        name = text.removesuffix("()").split("(")[0]
        if dotted := re.fullmatch(rf"({NAME})\.({NAME})", name):
            owner, member = dotted.groups()
            if owner in members() and member not in FILE_ENDINGS:
                if member not in members()[owner]:
                    unknown.append(text)
                continue
        is_code = re.fullmatch(NAME, name) and ("_" in name or name[0].isupper())
        if is_code and name not in words() and not (ROOT / name).exists():
            unknown.append(text)
    assert not unknown


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


def test_every_page_is_in_both_indexes() -> None:
    index, readme = (ROOT / "docs" / "README.md").read_text(), (ROOT / "README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert f"]({page.name})" in index
            assert f"](docs/{page.name})" in readme


EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = EXAMPLE.findall((ROOT / "docs" / "planner.md").read_text())


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_planner_print_what_is_written(code: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "planner.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == output


def test_thresholds_are_those_of_the_settings() -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    assert written == {field.name: str(field.default) for field in dataclasses.fields(Settings)}


def test_events_and_commands_are_all_there_and_come_from_where_it_is_said() -> None:
    rows = re.findall(r"^\| (`[A-Z].*) \|$", prose(ROOT / "docs" / "planner.md"), re.MULTILINE)
    said = {
        name: row.rpartition(" | ")[2]
        for row in rows
        for name in re.findall(rf"`({NAME})`", row.split(" | ")[0])
    }
    assert set(said) == {
        kind.__name__ for kind in [*events.Event.__args__, *events.Command.__args__]
    }
    for kind in events.Event.__args__:
        pattern = re.compile(rf"\b(?:ev\.)?{kind.__name__}\(")
        makers = {
            f"`actors/{path.name}`"
            for path in (ROOT / "actors").glob("*.py")
            if any(
                pattern.search(line) and "class " not in line
                for line in path.read_text().splitlines()
                if kind is not events.LaneDied
                or "ev." in line  # the engine has an error of that name
            )
        }
        if said[kind.__name__].startswith("nobody yet"):
            assert not makers, kind
        else:
            assert said[kind.__name__] in makers, kind


def test_the_picture_is_drawn_and_every_number_in_it_is_explained() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "step.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    numbers = [text.text for text in picture.iter(f"{svg}text") if text.get("class") == "number"]
    section = (
        (ROOT / "docs" / "step.md").read_text().split("## One decode step")[1].split("\n## ")[0]
    )
    assert sorted(map(int, numbers)) == [
        int(each) for each in re.findall(r"^(\d+)\. ", section, re.M)
    ]
    width, height = (float(each) for each in picture.get("viewBox", "").split()[2:])
    for box in picture.iter(f"{svg}rect"):
        if box.get("class"):
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
