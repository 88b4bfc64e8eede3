"""`gpumux serve`: run the daemon."""

from __future__ import annotations

import argparse
import sys

from gpumux import config
from gpumux.daemon import serve
from gpumux.errors import ConfigError
from gpumux.wire import endpoint as endpoints

EX_USAGE = 64
FLAGS = (
    "log_format", "gpu", "device", "gpu_shares", "gpu_model", "endpoint", "policy", "threads", "metrics_host", "metrics_port", "state_dir", "log_level",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    flags = {name: getattr(args, name) for name in FLAGS}
    try:
        for text in config.from_flags(flags).get("endpoint", ()):
            endpoints.parse(text)
    except ConfigError as error:  # wrong on the command line is wrong usage; wrong in a file is not
        sys.stderr.write(f"gpumux serve: error: {error.message}\n  {error.remedy}\n")
        return EX_USAGE

    def load() -> config.Config:
        return config.load(flags, path=args.config)

    return serve.run(load(), last=True, again=load)
