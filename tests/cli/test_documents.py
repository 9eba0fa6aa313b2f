"""What the documents, the examples and the files beside them promise, held against the code."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import stat
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from shadowlane.cli import app
from shadowlane.models import DEFAULT_MODEL, KNOWN
from shadowlane.ops.sampling import SamplingParams

from .conftest import FakeEngine

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = [
    (name, parameter)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if parameter.param_type_name == "option" and parameter.name != "help"
]


@pytest.mark.parametrize(
    ("command", "parameter"), OPTIONS, ids=[f"{name} {each.opts[0]}" for name, each in OPTIONS]
)
def test_each_option_is_documented_and_has_its_variable(
    command: str, parameter: typer.core.TyperOption
) -> None:
    document = (ROOT / "docs" / "cli.md").read_text()
    for flag in parameter.opts:
        assert f"`{flag}`" in document
    if parameter.name != "stop":  # read as lines, see options.py
        long_name = max(parameter.opts, key=len).lstrip("-")
        assert parameter.envvar == f"SHADOWLANE_{long_name.replace('-', '_').upper()}"


def test_documents_name_no_flag_and_no_command_that_is_not_there() -> None:
    flags = {flag for _, each in OPTIONS for flag in (*each.opts, *each.secondary_opts)}
    flags |= {"--help", "--version", "--install-completion", "--show-completion"}
    readme, document = (ROOT / "README.md").read_text(), (ROOT / "docs" / "cli.md").read_text()
    assert set(re.findall(r"`(--?[a-z][a-z-]*)", document)) <= flags
    for line in re.findall(r"^    shadowlane (.+)$", readme, re.MULTILINE):
        command = line.split()[0]
        assert command in COMMANDS, line
        options = {flag for name, each in OPTIONS if name == command for flag in each.opts}
        assert set(re.findall(r" (--?[a-z][a-z-]*)", line.partition("#")[0])) <= options, line
    assert set(COMMANDS) <= set(re.findall(r"\| `([a-z]+)", document))


def test_the_readme_has_no_broken_links() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "docs" / "api.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), target


def test_the_api_document_gives_the_real_sampling_defaults() -> None:
    text = " ".join((ROOT / "docs" / "api.md").read_text().split())
    written = re.search(r"SamplingParams\((temperature=[^`]*?ignore_eos=False)\)", text)
    assert written is not None
    expected = [
        f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(SamplingParams).parameters.items()
    ]
    assert written[1] == ", ".join(expected)


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_python_in_the_documents_runs(
    page: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_fake_model(monkeypatch, tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {"__name__": "snippet"})
    assert engine.requests
    assert engine.num_open == 0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_each_example_runs(
    path: Path,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_fake_model(monkeypatch, tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert engine.num_open == 0


def use_fake_model(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the default model a directory, so that nothing is fetched."""
    monkeypatch.setitem(KNOWN, DEFAULT_MODEL, None)  # type: ignore[arg-type]
    monkeypatch.setattr("shadowlane.models._fetch_known", lambda model, progress: folder)


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    ray = find_spec("ray")
    assert ray is not None
    assert ray.submodule_search_locations is not None
    folder = Path(ray.submodule_search_locations[0]) / "autoscaler"
    jsonschema.validate(cluster, json.loads((folder / "ray-schema.json").read_text()))
    assert cluster["provider"]["type"] == "local"
    assert "available_node_types" not in cluster  # the local provider refuses it
    commands = " ".join(cluster["head_start_ray_commands"])
    readme = (ROOT / "README.md").read_text()
    for variable in re.findall(r"RAY_\w+=\d+", commands):
        assert variable in readme
    assert "--object-store-memory=200000000" in commands


def test_the_ci_entry_is_executable_and_the_pins_are_exact() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert "torch==2.13.0" in pins
    assert (ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]
