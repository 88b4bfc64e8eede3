"""Run Python with the stand-in as its libcuda: python -m tests.stub.run RELEASE -m microbench.cuda.host_time, for
example."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.stub import build

if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(f"{__doc__}\nReleases of cuda-bindings: {', '.join(build.RELEASES)}", file=sys.stderr)
        sys.exit(64)
    with tempfile.TemporaryDirectory(prefix="gm-stub-") as directory:
        environment = build.environment(build.libraries(Path(directory)), build.release(sys.argv[1]))
        environment.pop(build.INSIDE)
        sys.exit(subprocess.run([sys.executable, *sys.argv[2:]], env=environment).returncode)
