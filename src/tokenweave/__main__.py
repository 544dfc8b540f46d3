"""``python -m tokenweave``: the same as the ``tokenweave`` command."""

import sys

from tokenweave.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
