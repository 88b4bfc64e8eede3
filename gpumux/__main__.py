"""`python -m gpumux` is the `gpumux` command, for where no script was installed."""

from __future__ import annotations

import sys

from gpumux.cli.main import main

sys.exit(main())
