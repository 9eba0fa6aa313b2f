"""Fields of a link's statistics in the arena, int64, and numbers in its spans.

The first two fields are the transfer lane's, the next two belong to whoever submits its copies.
"""

SWEEP_NBYTES, MOVED_NBYTES, BUSY_NS, NUM_SPANS = range(4)
IS_OPEN = 4  # whether the transfer lane's process has the card's memory open

# in place of a block
KEYS_AND_VALUES = -1
TRIAL = -2  # of a copy that was only timed
