"""What lanes need of a CUDA card: its memory, pinned host memory, streams that know counters."""
