"""`python -m node` is `shoal`: how one node process starts another with the same interpreter."""

from node.cli import main

if __name__ == "__main__":
    main()
