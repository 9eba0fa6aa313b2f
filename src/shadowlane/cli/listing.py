"""`shadowlane list`: models that run without network, and the known names that could be fetched."""

from __future__ import annotations

import json

from shadowlane.cli import options
from shadowlane.models import KNOWN, cached_models
from shadowlane.sizes import format_size

EPILOG = options.epilog("shadowlane list", "shadowlane list --json | jq -r '.[].path'")


def list_models(json_output: options.JsonOutput = False) -> None:
    """List the models that are on this machine, and known names that are not yet."""
    found = cached_models()
    if json_output:
        entries = [{"name": m.name, "path": str(m.path), "nbytes": m.nbytes} for m in found]
        print(json.dumps(entries))
        return
    names = {model.name for model in found}
    rows = [(m.name, format_size(m.nbytes), str(m.path)) for m in found]
    rows += [
        (m.name, format_size(m.nbytes), f"not fetched yet: {m.about} ({m.license})")
        for m in KNOWN.values()
        if m.name not in names
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, size, where in rows:
        print(f"{name:<{width}}  {size:>9}  {where}")
