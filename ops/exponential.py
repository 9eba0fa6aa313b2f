"""An exponential with the same bits wherever it is computed: by processors and by cards.

Libraries differ in the last bit, and a router's weights must not. So this is float64 arithmetic of
which IEEE 754 defines every bit, in an order that is written down: the exponent is split off, and a
Taylor polynomial of what is left, at most log(2) / 2, is off by 2e-16 of the result. Nobody may
contract its products and sums (`fma`). `ops/card/choices.py` has the same for cards.

Sums of exponentials are counted in units of 1 / ONE, so that they do not depend on an order.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from shadowlane.ops.compiled import njit

LEAST: Final = -80.0  # below it the result is 0: far less than one unit
PER_LOG2: Final = 1.0 / math.log(2.0)
LOG2_HIGH: Final = 0x162E42FEE / 2.0**33  # log(2) in two parts: this one times an exponent is exact
LOG2_LOW: Final = 1.9082149292705877e-10
POLYNOMIAL: Final = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))
ONE: Final = 2.0**40

_POLYNOMIAL = np.array(POLYNOMIAL)


@njit
def exponential(x: float) -> float:
    """exp of what is not above 0; of anything else, and of what is no number, 1."""
    if not x < 0.0:
        return 1.0
    if x < LEAST:
        return 0.0
    twos = math.floor(x * PER_LOG2 + 0.5)
    rest = (x - twos * LOG2_HIGH) - twos * LOG2_LOW
    found = 0.0
    for coefficient in _POLYNOMIAL:
        found = found * rest + coefficient
    return math.ldexp(found, int(twos))


@njit
def in_units(part: float) -> int:
    """An exponential, counted."""
    return math.floor(part * ONE + 0.5)


@njit
def sigmoid(x: float) -> float:
    small = exponential(-abs(x))
    return (1.0 if x >= 0.0 else small) / (1.0 + small)
