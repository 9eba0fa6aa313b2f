"""`python -m shadowlane` is the command line."""

from __future__ import annotations

if __name__ == "__main__":
    from shadowlane.cli import main

    main()
