"""`python -m gpumux` is the `gpumux` command, for systems without the script."""

from __future__ import annotations

import sys

from gpumux.cli.main import main

sys.exit(main())
