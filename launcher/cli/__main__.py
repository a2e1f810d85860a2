"""`python -m baton.launcher.cli` is the `baton` command."""

import sys

from baton.launcher.cli import main

sys.exit(main())
