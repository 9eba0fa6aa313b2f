"""What holds for all tests."""

import os
import signal
from pathlib import Path

# A test runner that was started in the background may have Ctrl-C ignored, and would hand that on
# to every program that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where there is no card, Triton's kernels are interpreted. Triton has to know before it is loaded,
# whoever loads it. The devices are those of NVIDIA's driver, under Linux and under WSL2.
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
