"""`gpumux serve`: run the daemon."""

from __future__ import annotations

import argparse

from gpumux import config
from gpumux.daemon import serve

FLAGS = (
    "gpu", "device", "endpoint", "policy", "threads", "metrics_host", "metrics_port", "state_dir", "log_level",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    settings = config.load({name: getattr(args, name) for name in FLAGS}, path=args.config)
    return serve.run(settings, last=True)
