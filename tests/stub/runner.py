"""Run tests on several releases of cuda-bindings: one process a release, forked where pytest is imported, which takes
longer than the tests.

python -m tests.stub.runner RELEASE=DIRECTORY... -- PYTEST ARGUMENTS. The last line is a JSON object, the status of
each.
"""

from __future__ import annotations

import json
import os
import sys

import hypothesis  # noqa: F401
import pytest

import tests.leaks  # noqa: F401

# What is imported above is imported on purpose.
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    statuses = {}
    for given in arguments[:at]:
        release, _, directory = given.partition("=")
        print(f"== cuda-bindings {release}", flush=True)
        child = os.fork()
        if child == 0:
            sys.path.insert(0, directory)
            status = int(pytest.main([*QUIET, *arguments[at + 1 :]]))
            import cuda.bindings

            if cuda.bindings.__version__ != release:
                print(f"these were the bindings of {cuda.bindings.__version__}")
                status = 99
            sys.stdout.flush()
            os._exit(status)
        statuses[release] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(statuses))
    return max(map(abs, statuses.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
