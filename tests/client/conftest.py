"""What tests of captures through a daemon share."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.capture.tracer import Tracer


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item for each trace that was begun."""
    made: list[int] = []
    trace = Tracer.trace

    def counted(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        made.append(len(made))
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(Tracer, "trace", counted)
    return made
