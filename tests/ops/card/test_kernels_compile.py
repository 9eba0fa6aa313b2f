"""What the interpreter runs must also compile: for cards that need not be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shadowlane.ops.card.packed_torch import DIRECT
from shadowlane.ops.layouts import LAYOUTS

pytest.importorskip("triton", reason="needs triton")


def test_every_kernel_compiles_and_keeps_to_its_registers(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(program), "86"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 8 * len(LAYOUTS) + 2 * (len(LAYOUTS) - len(DIRECT)) + 22
    assert [line for line in lines if " 0 bytes spilled" not in line] == []
