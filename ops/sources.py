"""A name for the code of this package as it stands, for caches that must not outlive an edit.

Apart from `compiled.py`, so that asking costs no compiler.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_key() -> str:
    """64 hex digits that change with any file of this package."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode() + b"\0")
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()
