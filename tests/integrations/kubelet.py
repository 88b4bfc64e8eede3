"""A kubelet as far as device plugins see it: it takes registrations, watches, allocates, and lists what pods use.

Its messages are read and written byte by byte, from the numbers in the kubelet's API, and not by the plugin's own
descriptors: a wrong number there would agree with itself.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

LIMIT_S = 60.0  # a bound for a broken test, never reached by a working one


def fields(data: bytes) -> list[tuple[int, bytes | int]]:
    """The fields of an encoded message: (number, bytes or integer)."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        assert key & 7 in (0, 2), "varints and strings alone are used"
        size = varint()
        if key & 7 == 0:
            found.append((key >> 3, size))
        else:
            found.append((key >> 3, data[at : at + size]))
            at += size
    return found


def encoded(*given: tuple[int, bytes | str]) -> bytes:
    """A message of these fields."""
    out = b""
    for number, value in given:
        value = value.encode() if isinstance(value, str) else value
        size, length = len(value), b""
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        out += bytes([number << 3 | 2]) + length + bytes([size]) + value
    return out


def texts(data: bytes, number: int) -> list[str]:
    return [value.decode() for each, value in fields(data) if each == number]


class FakeKubelet:
    """Its sockets are in `place`: kubelet.sock and, for the list of pods, pods.sock."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.registered: list[dict[int, bytes | int]] = []
        self.health: queue.Queue[dict[str, str]] = queue.Queue()  # of each list of devices that came
        self.pods: dict[str, tuple[str, list[str]]] = {}  # by name: resource, devices
        self._channel: grpc.Channel | None = None
        self._watcher: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """As a restart does: what other sockets there are in the directory is removed."""
        for other in self.place.glob("gpumux-*"):
            other.unlink()
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers(
            (
                _service("v1beta1.Registration", "Register", self._register),
                _service("v1.PodResourcesLister", "List", self._list),
            )
        )
        for name in ("kubelet.sock", "pods.sock"):
            self._server.add_insecure_port(f"unix://{self.place / name}")
        self._server.start()

    def stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._watcher.join(LIMIT_S)
        if self._server is not None:
            self._server.stop(0).wait()
            self._pool.shutdown()
        # The server's handlers refer to this object: it would stay, and grpc's descriptors with it, until a collection.
        self._channel = self._watcher = self._server = self._pool = None
        for name in ("kubelet.sock", "pods.sock"):
            (self.place / name).unlink(missing_ok=True)

    def allocate(self, *containers: list[str]) -> list[tuple[dict[str, str], list[tuple[str, str, bool]]]]:
        """What each container gets: its variables, and its mounts (in the container, on the node, read-only)."""
        request = encoded(*[(1, encoded(*[(1, each) for each in devices])) for devices in containers])
        answer = self._call("Allocate")(request, timeout=LIMIT_S)
        return [_container(each) for number, each in fields(answer) if number == 1]

    def refused(self, devices: list[str]) -> tuple[grpc.StatusCode, str]:
        """The status with which an allocation is refused."""
        try:
            self.allocate(devices)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"{devices} were allocated")

    def options(self) -> bytes:
        return self._call("GetDevicePluginOptions")(b"", timeout=LIMIT_S)

    def _call(self, method: str):
        return self._channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")

    def _register(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        said = dict(fields(request))
        # It dials the plugin before it answers: one that registers first and serves later is refused.
        self._channel = grpc.insecure_channel(f"unix://{self.place / said[2].decode()}")
        grpc.channel_ready_future(self._channel).result(LIMIT_S)
        self._watcher = threading.Thread(target=self._watch, args=(self._channel,))
        self._watcher.start()
        self.registered.append(said)
        return b""

    def _watch(self, channel: grpc.Channel) -> None:
        try:
            for answer in channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b""):
                devices = [fields(each) for number, each in fields(answer) if number == 1]
                self.health.put({dict(d)[1].decode(): dict(d)[2].decode() for d in devices})
        except grpc.RpcError:
            pass  # the plugin has gone, or the channel was closed

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        pods = []
        for name, (resource, devices) in self.pods.items():
            held = encoded((1, resource), *[(2, each) for each in devices])
            pods.append((1, encoded((1, name), (2, "default"), (3, encoded((1, "main"), (2, held))))))
        return encoded(*pods)


def _service(name: str, method: str, function):
    return grpc.method_handlers_generic_handler(name, {method: grpc.unary_unary_rpc_method_handler(function)})


def _container(data: bytes) -> tuple[dict[str, str], list[tuple[str, str, bool]]]:
    envs, mounts = {}, []
    for number, value in fields(data):
        inner = dict(fields(value))
        if number == 1:
            envs[inner[1].decode()] = inner[2].decode()
        elif number == 2:
            mounts.append((inner[1].decode(), inner[2].decode(), bool(inner.get(3, 0))))
        else:
            raise AssertionError(f"field {number} of a container")
    return envs, mounts
