"""The one place that decides how functions are compiled and where the machine code is kept.

numba keys its cache by the file that holds a function, and so misses edits in the modules that the
function calls. Therefore the cache folder itself is named after everything that shapes the code:
all sources of this package, the versions of compiler and interpreter, and the processor. An edit or
an upgrade starts an empty folder; two processors that share a home directory never mix.

Everything that is compiled in the project is decorated with `njit` or `cfunc` from here.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core import config
from numba.core.registry import cpu_target

from shadowlane.ops.sources import source_key
from shadowlane.paths import cache_dir


@cache
def target_features() -> tuple[str, str, str]:
    """(triple, processor, features) that numba makes code for; features as "+avx2,+f16c,..."."""
    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    return str(triple), str(processor), str(features)


@cache
def compiled_code_key() -> str:
    """Hash of all that the machine code depends on; names the cache folder."""
    digest = hashlib.sha256(source_key().encode())
    versions = (numba.__version__, llvmlite.__version__, platform.python_version())
    # what changes the code that is generated, apart from the code that generates it
    versions += (os.environ.get("SHADOWLANE_DOT", ""),)
    digest.update("\0".join((*versions, *target_features())).encode())
    return digest.hexdigest()[:24]


@cache
def compiled_code_directory() -> Path:
    """Where this process keeps its machine code: <user cache>/numba/<key>."""
    return cache_dir() / "numba" / compiled_code_key()


@cache
def _can_keep_code() -> bool:
    """False where the cache folder cannot be written: numba would fall back to folders of its own
    choice, whose names do not carry the key, and later run stale code from them."""
    directory = compiled_code_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


@contextmanager
def _own_cache_directory() -> Iterator[None]:
    # NOTE: numba reads CACHE_DIR when a function is decorated, not when it is compiled. Setting it
    # for that moment only leaves the caches of other packages in this process where they were.
    before = config.CACHE_DIR
    config.CACHE_DIR = str(compiled_code_directory())
    try:
        yield
    finally:
        config.CACHE_DIR = before


def njit(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: bool | set[str] = False,
    inline: str = "never",
    boundscheck: bool = False,
) -> Any:
    """Compile `function` to run without the GIL, cached on disk; usable with or without arguments.

    `fastmath` is off unless a kernel asks for it: it lets the compiler reorder sums, and a row must
    give the same bits however the rows around it are cut.
    """

    def decorate(target: Callable[..., Any]) -> Any:
        with _own_cache_directory():
            return numba.njit(
                cache=_can_keep_code(),
                nogil=True,
                error_model="numpy",
                fastmath=fastmath,
                inline=inline,
                boundscheck=boundscheck,
            )(target)

    return decorate if function is None else decorate(function)


def cfunc(signature: Any, *, fastmath: bool | set[str] = False) -> Callable[..., Any]:
    """Compile a function to a C callback at once, or load it from the cache; see its `.address`.

    Raises numba's typing errors if the function does not fit `signature`.
    """

    def decorate(target: Callable[..., Any]) -> Any:
        with _own_cache_directory():
            return numba.cfunc(
                signature,
                cache=_can_keep_code(),
                nopython=True,
                error_model="numpy",
                fastmath=fastmath,
                boundscheck=False,
            )(target)

    return decorate
