"""Recurrent layers as torch runs them on a GPU: through cuDNN, or step by step in fused cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten
_CUDNN = (torch.float16, torch.float32, torch.float64)
RELU, TANH, LSTM, GRU = range(4)  # as cuDNN numbers them
State = tuple[Tensor, ...]  # of one layer and direction: hidden, and the cell's where there is one


def cudnn_takes(x: Tensor) -> bool:
    """Whether torch gives it to cuDNN, as far as can be told without one."""
    return torch.backends.cudnn.enabled and x.dtype in _CUDNN and x.numel() > 0


def lstm(x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], *told: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _run(LSTM, x, tuple(hx), weights, *told)  # type: ignore[return-value]


def _without_cell(mode: int, x: Tensor, hx: Tensor, weights: Sequence[Tensor], *told: Any) -> tuple[Tensor, Tensor]:
    return _run(mode, x, (hx,), weights, *told)  # type: ignore[return-value]


gru, rnn_tanh, rnn_relu = (partial(_without_cell, mode) for mode in (GRU, TANH, RELU))


def _run(
    mode: int, x: Tensor, start: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The last layer's outputs, and what each state is at the end. Between layers dropout is torch's: what cuDNN would draw
    can't be captured, and comes of no generator."""
    ways = 2 if bidirectional else 1
    each = len(weights) // (num_layers * ways)
    drops = train and dropout > 0 and num_layers > 1
    if cudnn_takes(x) and not drops:
        return _through_cudnn(mode, x, start, weights, has_biases, num_layers, train, bidirectional, batch_first)
    if batch_first:
        x = x.transpose(0, 1)
    ends: list[State] = []
    if not cudnn_takes(x):
        states = [state.unbind(0) for state in start]
    for layer in range(num_layers):
        own = slice(layer * ways, (layer + 1) * ways)
        part = weights[own.start * each : own.stop * each]
        if cudnn_takes(x):
            first = tuple(state[own] for state in start)
            x, *last = _through_cudnn(mode, x, first, part, has_biases, 1, train, bidirectional, False)
            ends.append(tuple(last))
        else:
            outs, steps = [], x.unbind(0)
            for way in range(ways):
                held = part[way * each : (way + 1) * each]
                out, end = _steps(mode, steps, tuple(s[own.start + way] for s in states), held, has_biases, bool(way))
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, x.dim() - 1) if ways > 1 else outs[0]
        if drops and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    join = torch.cat if cudnn_takes(x) else torch.stack
    finals = [join(list(state), 0) for state in zip(*ends, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *finals)


def _through_cudnn(
    mode: int, x: Tensor, start: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    hx, cx = start[0], start[1] if len(start) > 1 else None
    hidden = (cx if cx is not None else hx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    each = (4 if has_biases else 2) + (1 if projected else 0)
    out, hy, cy, *_ = aten._cudnn_rnn.default(
        x, list(weights), each, None, hx.contiguous(), None if cx is None else cx.contiguous(), mode, hidden, projected,
        num_layers, batch_first, 0.0, train, bidirectional, [], None,
    )  # fmt: skip
    return (out, hy, cy) if cx is not None else (out, hy)


def _steps(
    mode: int, steps: Sequence[Tensor], state: State, weights: Sequence[Tensor], has_biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction."""
    outs: list[Tensor] = []
    cell = _CELLS[mode]
    for step in steps[::-1] if backwards else steps:
        state = cell(step, state, weights, has_biases)
        outs.append(state[0])
    return torch.stack(outs[::-1] if backwards else outs, 0), state


def _biases(weights: Sequence[Tensor], has_biases: bool) -> tuple[Tensor | None, Tensor | None]:
    return (weights[2], weights[3]) if has_biases else (None, None)


def _lstm_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    hy, cy = lstm_cell(x, state, weights[0], weights[1], *_biases(weights, has_biases))
    projection = weights[4 if has_biases else 2 :]
    return (torch.matmul(hy, projection[0].t()) if projection else hy), cy


def _gru_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    return (gru_cell(x, state[0], weights[0], weights[1], *_biases(weights, has_biases)),)


def _simple_step(
    activation: Callable[[Tensor], Tensor], x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool
) -> State:
    b_ih, b_hh = _biases(weights, has_biases)
    linear = torch.nn.functional.linear
    return (activation(linear(state[0], weights[1], b_hh).add_(linear(x, weights[0], b_ih))),)


_CELLS: dict[int, Callable[[Tensor, State, Sequence[Tensor], bool], State]] = {
    LSTM: _lstm_step,
    GRU: _gru_step,
    TANH: partial(_simple_step, torch.tanh),
    RELU: partial(_simple_step, torch.relu),
}


def lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
    made: Tensor = aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]
    return made
