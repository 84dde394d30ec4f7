"""`python -m rankloom`: the command line, and what a launcher's ranks run."""

from rankloom.cli import main

if __name__ == "__main__":
    main()
