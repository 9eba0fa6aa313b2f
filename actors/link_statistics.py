"""Fields of a link's statistics in the arena, int64. The first two are the transfer lane's, the
others belong to whoever submits its copies."""

SWEEP_NBYTES, MOVED_NBYTES, BUSY_NS, NUM_SPANS = range(4)

KEYS_AND_VALUES = -1  # in place of a block, in a span
