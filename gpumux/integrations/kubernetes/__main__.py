"""`python -m gpumux.integrations.kubernetes`: the device plugin of a node."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from gpumux.errors import ConfigError
from gpumux.types import PRIORITIES

EX_CONFIG = 78
ABOUT = """\
The daemon needs [access] grants and grants_endpoint, and this process the kubelet's directories: deploy/kubernetes has
both. It runs until SIGTERM, and follows restarts of the kubelet.

exit codes: 0 stopped as asked, 2 wrong usage, 78 the configuration is wrong or a package is missing
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m gpumux.integrations.kubernetes",
        description="Offer a node's device to its kubelet in shares.",
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--grants", metavar="DIR", type=Path, required=True, help="the daemon's directory of grants")
    add(
        "--endpoint", metavar="ipc://PATH", required=True, help="the daemon's grants_endpoint, at this path on the node"
    )
    add("--resource", metavar="DOMAIN/NAME", default="gpumux.dev/share", help="what pods ask for (gpumux.dev/share)")
    add("--shares", metavar="N", type=int, default=100, help="how many are offered under this name (default 100)")
    add("--of", metavar="N", type=int, default=100, help="how many the device has in all (default 100)")
    add("--max-priority", choices=PRIORITIES, default="low", help="the highest priority of jobs that have them (low)")
    add("--ready-url", metavar="URL", default="http://127.0.0.1:9402/readyz", help="the daemon's /readyz")
    add("--kubelet", metavar="DIR", type=Path, default=Path("/var/lib/kubelet/device-plugins"),
        help="the kubelet's directory of plugins")  # fmt: skip
    add("--pod-resources", metavar="SOCKET", type=Path, default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        help="where the kubelet lists what pods use")  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        try:
            from gpumux.integrations.kubernetes import plugin
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed", "pip install 'grpcio>=1.60' 'protobuf>=5'") from error
        from gpumux.integrations.kubernetes.shares import Offer

        offer = Offer(args.resource, args.shares, args.of, PRIORITIES[args.max_priority])
        node = plugin.Node(args.grants, args.endpoint, args.ready_url, args.kubelet, args.pod_resources)
        return plugin.run(offer, node)
    except ConfigError as error:
        logging.getLogger("gpumux.device_plugin").error("%s", error)
        return EX_CONFIG


if __name__ == "__main__":
    sys.exit(main())
