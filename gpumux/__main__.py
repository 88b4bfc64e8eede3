"""`python -m gpumux` is the `gpumux` command, for systems without the script."""

from __future__ import annotations

import sys

import gpumux
from gpumux.cli.setup import installation

if not hasattr(gpumux, "__version__"):  # another project's files lie over this one's, and nothing else can be imported
    sys.exit(
        f"gpumux: {installation.other_project() or 'another project'}, has overwritten this one\n  {installation.MEND}"
    )

from gpumux.cli.main import main

sys.exit(main())
