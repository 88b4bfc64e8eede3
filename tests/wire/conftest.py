from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpumux.wire.limits import Limits
from gpumux.wire.router import Router
from tests.wire.world import LocalClient, RawClient, World


@pytest.fixture
def make_world(runtime_dir: Path) -> Iterator[Callable[..., World]]:
    """A router on the runtime directory with the limits given."""
    routers: list[Router] = []

    def make(endpoints: list[str] | None = None, curve: Any = None, **limits: Any) -> World:
        router = Router(endpoints or [f"ipc://{runtime_dir}/g.sock"], runtime_dir, Limits(**limits), curve)
        routers.append(router)
        return World(router)

    yield make
    for router in routers:
        router.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def make_client() -> Iterator[Callable[..., RawClient]]:
    with zmq.Context() as context:
        clients: list[RawClient] = []

        def make(world: World, **options: Any) -> RawClient:
            endpoint = options.pop("endpoint", None) or world.router.addresses[0]
            clients.append(RawClient(context, endpoint, **options))
            return clients[-1]

        yield make
        for client in clients:
            client.close()


@pytest.fixture
def join(make_client) -> Iterator[Any]:
    made: list[LocalClient] = []

    def make(world: World, **options: Any) -> LocalClient:
        made.append(LocalClient(world, make_client(world, **options)))
        return made[-1]

    yield make
    for client in made:
        client.close()
