"""Triton's kernels run interpreted here, on any machine; it has to be known before Triton loads."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
