"""`python -m sparsam` is `sparsam`."""

from sparsam.cli import main

if __name__ == "__main__":
    main()
