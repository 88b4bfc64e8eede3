"""Measures a network among ranks with torch.distributed: gloo on CPUs, NCCL on CUDA devices (never run so far).

`measure_here` starts all ranks as processes of this machine, which meet over a file and talk over the loopback device.
`measure_as` makes this process one of several ranks, which meet at a TCP store that rank 0 keeps. Ranks wait for each
other no longer than the measurement's limit. torch is imported where a rank begins.

Each round measures every operation, group and size once, so that a disturbance of a second spoils a few points of one
round and not all of one point. The first round warms up and is not counted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpumux.errors import ConfigError, GpumuxError, RankLost
from gpumux.plan.costs import powers_of_two
from gpumux.plan.network.measured import KINDS, Kind, MeasuredNetwork, Point, Series, dumps, loads

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

Device: TypeAlias = Literal["cpu", "cuda"]
Progress: TypeAlias = Callable[[int, int, str], None]  # rounds done, rounds in all, what is being measured

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SMALLEST = 8
STEP = 8  # each size is so many times the one before
MOST_REPEATS, LEAST_REPEATS, REPEATED_BYTES = 20, 3, 1 << 20  # of one operation between two barriers
POLL_S = 0.05
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What all ranks measure, with the same values on each. `largest`: bytes of the largest size. `limit_s`: how long a
    rank waits for the others to come, and for any one operation. Raises ConfigError."""

    ranks: int
    device: Device = "cpu"
    largest: int = 4 << 20
    rounds: int = 9
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"{self.ranks} ranks", "a network is among 2 or more")
        if self.largest < SMALLEST * STEP:
            raise ConfigError(f"a largest size of {self.largest} B", f"give {SMALLEST * STEP} B or more")
        if self.rounds < 1 or not self.limit_s > 0:
            raise ConfigError(f"{self.rounds} rounds, a limit of {self.limit_s} s", "give 1 or more, and above 0")
        if self.device not in BACKENDS:
            raise ConfigError(f"device {self.device!r}", f"choose one of {', '.join(BACKENDS)}")

    def sizes(self) -> list[int]:
        """Bytes, rising; all are whole numbers of float32."""
        found = [SMALLEST]
        while found[-1] * STEP < self.largest:
            found.append(found[-1] * STEP)
        return [*found, self.largest // 4 * 4]

    def groups(self) -> list[int]:
        """The numbers of ranks that are measured: powers of two, and all."""
        return sorted({*powers_of_two(self.ranks), self.ranks} - {1})


# ---- All ranks on this machine.


def measure_here(asked: Measurement, progress: Progress | None = None) -> MeasuredNetwork:
    """Start the ranks as processes, and measure. Raises RankLost if one ends early, ConfigError for what can't be."""
    with TemporaryDirectory(prefix="gpumux-network-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ranks = [stack.enter_context(_rank_process(asked, rank, folder)) for rank in range(asked.ranks)]
        told = stack.enter_context((folder / "out-0").open())
        ended: list[int | None] = [None]
        while None in ended and not any(ended):
            time.sleep(POLL_S)
            ended = [each.poll() for each in ranks]
            for line in told:
                if progress is not None:
                    progress(*json.loads(line))
        if any(ended):
            raise _failure(ended, folder)
        return loads((folder / "result").read_text())


@contextlib.contextmanager
def _rank_process(asked: Measurement, rank: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank as a process, which is killed at the end if it still runs."""
    told = json.dumps({"asked": asdict(asked), "rank": rank, "folder": str(folder), "parent": os.getpid()})
    with (folder / f"out-{rank}").open("wb") as output, (folder / f"err-{rank}").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpumux.plan.network.ranks", told], stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _failure(ended: Sequence[int | None], folder: Path) -> GpumuxError:
    """What ended the measurement: a rank's own error, or a death, rather than that the others lost this rank."""
    lost = GpumuxError("")
    for rank, code in enumerate(ended):
        error = folder / f"error-{rank}"
        if error.exists():
            kind, message, remedy = json.loads(error.read_text())
            if kind != RankLost.code:
                return ConfigError(message, remedy)
            lost = RankLost(message, remedy)
        elif code:
            said = (folder / f"err-{rank}").read_text(errors="replace").strip().splitlines() or ["no message"]
            return RankLost(f"rank {rank} ended with code {code}: {said[-1]}", "measure again")
    return lost


def _main(told: str) -> int:
    """A rank that `measure_here` started: progress to the output, the result and errors to files."""
    asked = json.loads(told)
    folder, rank = Path(asked["folder"]), int(asked["rank"])

    def progress(*values: object) -> None:
        print(json.dumps(values), flush=True)

    try:
        from gpumux.device.workers.fork_server_process import die_with

        die_with(int(asked["parent"]))

        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        store = dist.FileStore(str(folder / "store"), int(asked["asked"]["ranks"]))  # type: ignore[attr-defined]
        found = _measure(Measurement(**asked["asked"]), rank, store, progress)
    except GpumuxError as error:
        written = folder / f"writing-{rank}"
        written.write_text(json.dumps([error.code, error.message, error.remedy]))
        written.rename(folder / f"error-{rank}")
        return 1
    if found is not None:
        (folder / "result").write_text(dumps(found))
    return 0


# ---- One of several ranks.


def measure_as(asked: Measurement, rank: int, store: str, progress: Progress | None = None) -> MeasuredNetwork | None:
    """Be one of the ranks. store: HOST:PORT of the store, which rank 0 keeps; the measurement's connections use the
    loopback device if it is there, too. The network on rank 0, None on others. Raises RankLost if a rank does not come
    or is lost, ConfigError for what can't be."""
    if not 0 <= rank < asked.ranks:
        raise ConfigError(f"rank {rank} of {asked.ranks}", f"give 0 to {asked.ranks - 1}")
    host, colon, port = store.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"store {store!r}", "give HOST:PORT of rank 0, as in 10.0.0.1:29500")
    host = host.strip("[]")
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"no address for {host}: {error}", "give a host that all ranks can reach") from None
    if ipaddress.ip_address(address[4][0]).is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if rank:
        return _measure(asked, rank, _join_store(str(address[4][0]), int(port), asked.limit_s), progress)
    with _listening(address, store) as listener:
        return _measure(asked, rank, _own_store(listener, asked.limit_s), progress)


@contextlib.contextmanager
def _listening(address: Any, store: str) -> Iterator[socket.socket]:
    """A socket that listens on the store's address alone, where torch would listen on every one."""
    listener = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address[4])
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {store}: {error.strerror}", "give an address of rank 0's machine") from None
    with listener:
        yield listener


def _own_store(listener: socket.socket, limit_s: float) -> Store:
    import torch.distributed as dist

    host, port = listener.getsockname()[:2]
    limit, descriptor = timedelta(seconds=limit_s), listener.detach()
    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor)


def _join_store(host: str, port: int, limit_s: float) -> Store:
    """The store of rank 0, as soon as it is there. Raises RankLost after the limit."""
    import torch.distributed as dist

    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=limit_s):
            store = dist.TCPStore  # type: ignore[attr-defined]
            return store(host, port, None, False, timedelta(seconds=limit_s), wait_for_workers=False)
        if time.monotonic() - began > limit_s:
            raise RankLost(
                f"rank 0 did not come to {host}:{port} within {limit_s:g} s",
                "start it with the same --store, and see that this machine may connect to it",
            )
        time.sleep(POLL_S)


# ---- Measuring.


def _measure(asked: Measurement, rank: int, store: Store, progress: Progress | None) -> MeasuredNetwork | None:
    """Meet the other ranks, measure, and part. The network on rank 0, None on others."""
    import torch
    import torch.distributed as dist

    device = _device(asked, rank)
    limit = timedelta(seconds=asked.limit_s)
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    try:
        machines = _meet(asked, rank, store, _machine(device))
        dist.init_process_group(BACKENDS[asked.device], store=group, rank=rank, world_size=asked.ranks, timeout=limit)
        times = _Operations(asked, rank, device).rounds(progress if rank == 0 else None)
        dist.barrier()
    except RuntimeError as error:  # torch's errors of collectives and stores are of this kind
        raise RankLost(
            f"rank {rank} lost another: {(str(error).splitlines() or [''])[0]}",
            f"see what the other ranks say; none may be silent for longer than the limit of {asked.limit_s:g} s",
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank:
        return None
    series = tuple(
        Series(kind, ranks, tuple(Point(size, median(each), min(each), max(each)) for size, each in found.items()))
        for (kind, ranks), found in times.items()
    )
    return MeasuredNetwork(
        BACKENDS[asked.device],
        asked.device,
        asked.ranks,
        asked.rounds,
        tuple(named for named, _ in machines),
        {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        series,
        note(machines) if asked.device == "cpu" else "",
    )


def _device(asked: Measurement, rank: int) -> torch.device:
    """The device of this rank; ranks of one machine are taken to be numbered one after the other."""
    import torch

    if asked.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here", "use --device cpu, which measures gloo")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _machine(device: torch.device) -> tuple[str, int]:
    """This rank's machine in words, and its cores."""
    from gpumux.plan.measure import device_name

    cores = len(os.sched_getaffinity(0))
    return f"{platform.node()}: {device_name(str(device))}, {cores} cores", cores


def note(machines: Sequence[tuple[str, int]]) -> str:
    """A sentence if some ranks wait for each other's processor."""
    for named, cores in machines:
        here = sum(each == named for each, _ in machines)
        if here > cores:
            return (
                f"{here} ranks share {cores} cores of {named.partition(':')[0]}: they wait for a core as well as for"
                " the network, as jobs there would"
            )
    return ""


def _meet(asked: Measurement, rank: int, store: Store, machine: tuple[str, int]) -> list[tuple[str, int]]:
    """Wait until all ranks are there, and return their machines. Raises RankLost after the limit, ConfigError if two
    have one number or they differ in what they measure."""
    mine = asdict(asked) | {"limit_s": None}
    if store.add(f"number/{rank}", 1) > 1:
        raise ConfigError(f"there is another rank {rank}", "give each its own --rank")
    store.set(f"came/{rank}", json.dumps([mine, machine]))
    missing, began = list(range(asked.ranks)), time.monotonic()
    while missing := [each for each in missing if not store.check([f"came/{each}"])]:
        if time.monotonic() - began > asked.limit_s:
            raise RankLost(
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not come within"
                f" {asked.limit_s:g} s",
                "start every rank with the same --ranks and --store within the limit, or give a longer --limit",
            )
        time.sleep(POLL_S)
    machines = []
    for each in range(asked.ranks):
        theirs, found = json.loads(store.get(f"came/{each}"))
        for name, value in theirs.items():
            if value != mine[name]:
                raise ConfigError(
                    f"rank {each} measures with {name} {value}, and rank {rank} with {mine[name]}",
                    "give all ranks the same options",
                )
        machines.append((str(found[0]), int(found[1])))
    return machines


class _Operations:
    """The operations of one rank, and their times."""

    def __init__(self, asked: Measurement, rank: int, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        self.asked, self.rank, self.device = asked, rank, device
        self.groups: dict[int, ProcessGroup | None] = {
            ranks: None if ranks == asked.ranks else dist.new_group(list(range(ranks))) for ranks in asked.groups()
        }
        self.sent = torch.zeros(asked.largest // 4, device=device)
        self.received = torch.zeros_like(self.sent)

    def rounds(self, progress: Progress | None) -> dict[tuple[Kind, int], dict[int, list[float]]]:
        """Seconds of the slowest rank in each round, by operation, number of ranks and size. Meaningless on a rank that
        is not in every group."""
        import torch.distributed as dist

        times: dict[tuple[Kind, int], dict[int, list[float]]] = {}
        for number in range(self.asked.rounds + 1):
            for ranks, group in self.groups.items():
                for kind in KINDS:
                    if progress is not None:
                        progress(number, self.asked.rounds + 1, f"{kind} among {ranks}")
                    for size in self.asked.sizes():
                        dist.barrier()
                        if self.rank < ranks:
                            seconds = self._seconds(kind, ranks, group, size)
                            if number:
                                times.setdefault((kind, ranks), {}).setdefault(size, []).append(seconds)
        return times

    def _seconds(self, kind: Kind, ranks: int, group: ProcessGroup | None, size: int) -> float:
        """The median of several operations in a row, on the rank where it is longest."""
        import torch
        import torch.distributed as dist

        run = self._sum if kind == "all-reduce" else self._shift
        found = []
        self._wait()
        for _ in range(max(LEAST_REPEATS, min(MOST_REPEATS, REPEATED_BYTES // size))):
            began = time.perf_counter()
            run(ranks, group, size // 4)
            self._wait()
            found.append(time.perf_counter() - began)
        longest = torch.tensor(median(found), dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        return float(longest)

    def _sum(self, ranks: int, group: ProcessGroup | None, count: int) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.sent[:count], group=group)

    def _shift(self, ranks: int, group: ProcessGroup | None, count: int) -> None:
        """Send to the next rank, and receive from the one before."""
        import torch.distributed as dist

        moves = [
            dist.P2POp(dist.isend, self.sent[:count], (self.rank + 1) % ranks, group),
            dist.P2POp(dist.irecv, self.received[:count], (self.rank - 1) % ranks, group),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
