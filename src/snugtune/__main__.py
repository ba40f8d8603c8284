"""`python -m snugtune`."""

from snugtune.cli import main

if __name__ == "__main__":
    main()
