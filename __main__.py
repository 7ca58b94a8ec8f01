"""``python -m rollstream``."""

from .cli import main

if __name__ == "__main__":
    main()
