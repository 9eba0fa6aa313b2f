"""What holds for all tests."""

import signal

# A test runner that was started in the background may have Ctrl-C ignored, and would hand that on
# to every program that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
