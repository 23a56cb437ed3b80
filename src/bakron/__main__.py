"""``python -m bakron``: the command line."""

from bakron.cli import main

if __name__ == "__main__":
    main()
