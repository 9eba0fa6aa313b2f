"""Models known by their shapes alone, and machines by their figures: what plans can be made of.

Nothing here reads weights; nothing is said about what a model would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shadowlane.ops.errors import ModelError
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Hardware, read_hardware

if TYPE_CHECKING:
    from shadowlane.actors.blueprint import Blueprint
    from shadowlane.ops.files.base import ModelFiles
    from shadowlane.planner.hybrid import Model


def known_shapes() -> tuple[str, ...]:
    """Names that `shape_catalog` takes."""
    return tuple(_shapes())


def longest_context(name: str) -> int:
    """Tokens that the model allows; a catalog has room for 4096 at most unless asked for more."""
    return int(_shapes()[name]["config"]["max_position_embeddings"])


def _shapes() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("models.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def shape_catalog(
    name: str, context: int | None = None, layouts: Mapping[str, str] | None = None
) -> Catalog:
    """The groups of a model by its short name. Raises ModelError for one that is not known.

    layouts: pattern of tensor names -> format, instead of those the name stands for.
    """
    return _cut(name, context, layouts).catalog


def shape_model(
    name: str, context: int | None = None, layouts: Mapping[str, str] | None = None
) -> Model:
    """The same as loads, for plans over cards."""
    from shadowlane.planner.hybrid import model_of

    cut = _cut(name, context, layouts)
    return model_of(cut.catalog, name, cut.config.windows)


def _cut(name: str, context: int | None, layouts: Mapping[str, str] | None) -> Blueprint:
    from shadowlane.actors.blueprint import cut_model
    from shadowlane.actors.spec import Options

    files = shape_files(name, layouts)
    return cut_model(files, Options(context=context), 1, is_elsewhere=True)


def shape_files(name: str, layouts: Mapping[str, str] | None = None) -> ModelFiles:
    """The same model's tensors as they would stand in its files."""
    from shadowlane.ops.files.imagined import imagine_files

    shapes = _shapes()
    if name not in shapes:
        raise ModelError(f"model must be one of {', '.join(shapes)}; got {name!r}")
    return imagine_files(name, shapes[name]["config"], layouts or shapes[name]["layouts"])


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which the second of two equal keys does not silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                raise ValueError(
                    f"{name} must be there once; it is in lines {first[name]} and {line}"
                )
            first[name] = line
        return super().construct_mapping(node, deep)


def load_hardware(path: Path) -> Hardware:
    """Read a hardware file. Raises ModelError naming the file and what is wrong with it."""
    try:
        data = yaml.load(path.read_text(), _UniqueKeys)
        return read_hardware(data)
    except FileNotFoundError:
        raise ModelError(f"no such hardware file: {path}") from None
    except IsADirectoryError:
        raise ModelError(f"a hardware file must be a file; {path} is a folder") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: {reason}") from None
