"""The Ray actors, the shared-memory plane that joins them, and the lowering of plans to tables."""
