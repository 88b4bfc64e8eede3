"""The device plugin: one process a node, which offers the daemon's device to the kubelet in shares.

It listens on a socket in the kubelet's directory, and registers there. The kubelet then keeps one call (ListAndWatch)
open, by which it learns whether the shares are healthy, and calls Allocate for every container that asks for some. The
answer gives the container the daemon's socket for programs with a grant, and the token of a grant of its own
(gpumux/wire/grants.py). A kubelet that restarts removes all plugins' sockets and makes its own anew; the plugin then
listens and registers again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc

from gpumux.errors import AccessDenied, ConfigError
from gpumux.integrations.kubernetes import api
from gpumux.integrations.kubernetes.shares import NodeShares, Offer
from gpumux.wire.endpoint import ENVIRONMENT, parse
from gpumux.wire.grants import TOKEN, GrantDirectory

log = logging.getLogger("gpumux.device_plugin")

TURN_S = 5.0  # between two looks at the kubelet, the daemon and the grants in use
ANSWER_S = 5.0  # that the kubelet, or the daemon, has for an answer
_WATCHERS = 8  # calls of the kubelet at once, of which one ListAndWatch stays


@dataclass(frozen=True, slots=True)
class Node:
    """Where things are on the node. `endpoint`: the daemon's ipc:// one for programs with a grant, at the same path in
    every container. `ready_url`: answers 200 while the daemon serves (its /readyz)."""

    grants: Path
    endpoint: str
    ready_url: str = "http://127.0.0.1:9402/readyz"
    kubelet: Path = Path("/var/lib/kubelet/device-plugins")
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")


class DevicePlugin:
    """Serves one offer. `step` does what is due, and is to be called every TURN_S; `close` ends it."""

    def __init__(self, offer: Offer, node: Node) -> None:
        socket = parse(node.endpoint).path
        if socket is None:
            raise ConfigError(
                f"{node.endpoint} is not on this machine", "name the daemon's grants_endpoint, an ipc:// one"
            )
        self._offer, self._node, self._directory = offer, node, socket.parent
        self._shares = NodeShares(offer, GrantDirectory(node.grants))
        self._socket = node.kubelet / f"gpumux-{offer.resource.partition('/')[2]}.sock"
        self._changed = threading.Condition()
        self._allocating = threading.Lock()  # the directory of grants is read and written by one call at a time
        self._healthy = False
        self._serving = 0  # a number for each server: watchers of an older one end
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._registered_at: tuple[int, int] | None = None  # the kubelet's socket then

    # ---- what is due

    def step(self, now: float) -> None:
        """Look at the daemon, the kubelet and the grants. Errors of either are logged, and tried again next time."""
        self._set_health(_answers(self._node.ready_url))
        try:
            self._follow_kubelet()
            in_use = api.devices_in_use(str(self._node.pod_resources), ANSWER_S)
        except grpc.RpcError as error:
            # What is in use is not known, so nothing is released.
            log.warning("the kubelet does not answer: %s", _details(error))
            return
        except OSError as error:
            log.warning("the kubelet is away: %s", error.strerror)
            return
        try:
            with self._allocating:
                for grant in self._shares.release_unused(in_use, now):
                    log.info("grant %s released: its container is gone", grant)
        except (ConfigError, AccessDenied) as error:
            log.error("grants can't be released: %s: %s", error.message, error.remedy)

    def close(self) -> None:
        """Stop serving. Grants stay: containers that run keep theirs while the plugin is away. Idempotent."""
        server, self._server = self._server, None
        with self._changed:
            self._serving += 1
            self._changed.notify_all()
        if server is not None:
            server.stop(grace=1.0).wait()
        if self._threads is not None:
            self._threads.shutdown()
        self._socket.unlink(missing_ok=True)

    def _set_health(self, healthy: bool) -> None:
        with self._changed:
            if healthy is not self._healthy:
                self._healthy = healthy
                self._changed.notify_all()
                log.info("shares are %s", "healthy" if healthy else "unhealthy: the daemon is not ready")

    def _follow_kubelet(self) -> None:
        """Serve and register, unless that was done with this kubelet and our socket is still there."""
        info = (self._node.kubelet / api.KUBELET_SOCKET).stat()
        kubelet = info.st_dev, info.st_ino
        if self._server is not None and kubelet == self._registered_at and self._socket.is_socket():
            return
        self.close()
        self._serve()
        api.register(str(self._node.kubelet / api.KUBELET_SOCKET), self._socket.name, self._offer.resource, ANSWER_S)
        self._registered_at = kubelet
        log.info("registered %d of %s", self._offer.shares, self._offer.resource)

    def _serve(self) -> None:
        self._threads = ThreadPoolExecutor(_WATCHERS)
        server = grpc.server(self._threads, options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((_handlers(self),))
        server.add_insecure_port(f"unix://{self._socket}")
        server.start()
        self._server = server

    # ---- calls of the kubelet

    def options(self, request: Any, context: grpc.ServicerContext) -> Any:
        """No call before a container starts, and any share is as good as another."""
        return api.MESSAGES["DevicePluginOptions"]()

    def list_and_watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """All shares with their health, now and whenever it changes."""
        with self._changed:
            serving, said = self._serving, None
        context.add_callback(self._wake)
        while True:
            with self._changed:
                while self._healthy is said and serving == self._serving and context.is_active():
                    self._changed.wait()
                if serving != self._serving or not context.is_active():
                    return
                said = self._healthy
            health = api.HEALTHY if said else api.UNHEALTHY
            device = api.MESSAGES["Device"]
            yield api.MESSAGES["ListAndWatchResponse"](
                devices=[device(ID=each, health=health) for each in self._offer.devices()]
            )

    def allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        """A grant for each container."""
        try:
            with self._allocating:
                tokens = [self._shares.allocate(list(each.devices_ids)) for each in request.container_requests]
        except (ConfigError, AccessDenied) as error:
            log.error("shares can't be granted: %s: %s", error.message, error.remedy)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{error.message}: {error.remedy}")
        return api.MESSAGES["AllocateResponse"](container_responses=[self._container(token) for token in tokens])

    def _container(self, token: str) -> Any:
        """What a container with this token gets. The mount can't be written to: root in a container could remove the
        sockets. A runtime that hands GPUs to all containers whose image asks for them gives it none."""
        place = str(self._directory)
        return api.MESSAGES["ContainerAllocateResponse"](
            envs={ENVIRONMENT: self._node.endpoint, TOKEN: token, "NVIDIA_VISIBLE_DEVICES": "void"},
            mounts=[api.MESSAGES["Mount"](container_path=place, host_path=place, read_only=True)],
        )

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def run(offer: Offer, node: Node) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    plugin, stop = DevicePlugin(offer, node), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        while not stop.is_set():
            plugin.step(time.monotonic())
            stop.wait(TURN_S)
    finally:
        plugin.close()
    return 0


def _handlers(plugin: DevicePlugin) -> grpc.GenericRpcHandler:
    def unary(function: Callable[..., Any], request: str) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            function,
            request_deserializer=api.MESSAGES[request].FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    watch = grpc.unary_stream_rpc_method_handler(
        plugin.list_and_watch,
        request_deserializer=api.MESSAGES["Empty"].FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
    return grpc.method_handlers_generic_handler(
        f"{api.VERSION}.DevicePlugin",
        {
            "GetDevicePluginOptions": unary(plugin.options, "Empty"),
            "ListAndWatch": watch,
            "Allocate": unary(plugin.allocate, "AllocateRequest"),
        },
    )


def _answers(url: str) -> bool:
    """Whether the daemon says that it serves."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException, ValueError):  # what listens there need not speak HTTP
        return False


def _details(error: grpc.RpcError) -> str:
    return str(error.details()) if isinstance(error, grpc.Call) else str(error)
