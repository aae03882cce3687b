"""python -m regard: the command `regard`, where it is not on the path."""

import sys

from regard_command import main

if __name__ == "__main__":
    sys.exit(main())
