"""`gpumux serve`: run the daemon."""

from __future__ import annotations

import argparse

from gpumux import config
from gpumux.cli.main import WrongUsage
from gpumux.daemon import main
from gpumux.errors import ConfigError
from gpumux.wire import endpoint

FLAGS = (
    "log_format", "gpu", "device", "gpu_shares", "gpu_model", "endpoint", "policy", "threads", "metrics_host",
    "metrics_port", "state_dir", "log_level",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    flags = {name: getattr(args, name) for name in FLAGS}
    try:
        for text in config.from_flags(flags).get("endpoint", ()):
            endpoint.parse(text)
    except ConfigError as error:  # wrong on the command line is wrong usage; wrong in a file is not
        raise WrongUsage("gpumux serve", error.message, error.remedy) from error

    def load() -> config.Config:
        return config.load(flags, path=args.config)

    return main.run(load(), last=True, again=load)
