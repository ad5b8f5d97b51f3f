"""Recurrent layers as GPUs compute them: one product of all inputs, then a small one for each step of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = "recurrent_steps"
"""Name of the operator that stands for all steps of time; the one of its backward ends in "_backward"."""

_GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Sums of inputs and states that a step has for each element of the state."""

_RESERVED = {4: 5, 3: 4, 1: 0}
"""Numbers that are kept for backward of each element and step, beside results: gates, and an LSTM's cell or what a
GRU's reset gate meets."""


def is_recurrent(func: Callable[..., Any]) -> bool:
    """Whether a function is a recurrent layer."""
    return func in _GATES


def recurrent(
    func: Callable[..., Any],
    given: Tensor,
    states: Tensor | tuple[Tensor, Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Computes with shapes alone what `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu` do.

    Args:
        func: Which of them.
        given: (time, batch, features), or (batch, time, features).
        states: (layers x directions, batch, width); of an LSTM those and its cells'.
        parameters: Of each layer and direction in turn, as the layer's own function takes them.
        has_biases: Whether two biases are among them.
        layers: How many.
        dropout: Between layers.
        train: Whether they train.
        bidirectional: Whether each layer runs both ways.
        batch_first: Whether samples come first.
    """
    gates, directions = _GATES[func], 1 + bidirectional
    each = len(parameters) // (layers * directions)
    hidden, cells = states if isinstance(states, tuple) else (states, None)
    x = given.transpose(0, 1) if batch_first else given
    last, last_cells = list[Tensor](), list[Tensor]()
    for layer in range(layers):
        found = []
        for direction in range(directions):
            at = layer * directions + direction
            own = list(parameters[at * each : (at + 1) * each])
            bias, other = own[2:4] if has_biases else (None, None)
            projection = own[-1] if each == (5 if has_biases else 3) else None
            cell = None if cells is None else cells[at]
            sums = F.linear(x, own[0], bias)
            result, _, cell_after = _steps()(sums, hidden[at], cell, own[1], other, gates)
            result = result if projection is None else F.linear(result, projection)
            found.append(result)
            last.append(result[-1])
            last_cells.append(cell_after)
        x = torch.cat(found, -1) if bidirectional else found[0]
        if layer < layers - 1:
            x = F.dropout(x, dropout, train)
    ended = (torch.stack(last),) if cells is None else (torch.stack(last), torch.stack(last_cells))
    return (x.transpose(0, 1) if batch_first else x, *ended)


@cache
def _steps() -> Callable[..., Any]:
    """The operator, which torch is told of when it is first needed."""
    library = torch.library
    inputs = "Tensor sums, Tensor state, Tensor? cell, Tensor weight, Tensor? bias, int gates"
    library.define(f"paceline::{STEPS}", f"({inputs}) -> (Tensor, Tensor, Tensor)")
    library.define(
        f"paceline::{STEPS}_backward",
        "(Tensor grad, Tensor grad_cell, Tensor state, Tensor weight, Tensor result, Tensor reserved) "
        "-> (Tensor, Tensor, Tensor)",
    )

    def forward(
        sums: Tensor, state: Tensor, cell: Tensor | None, weight: Tensor, bias: Tensor | None, gates: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, batch, columns = sums.shape
        width = columns // gates
        return (
            sums.new_empty(steps, batch, width),
            sums.new_empty(steps, batch, _RESERVED[gates] * width),
            sums.new_empty(batch, width),
        )

    def backward(
        grad: Tensor, grad_cell: Tensor, state: Tensor, weight: Tensor, result: Tensor, reserved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return grad.new_empty(*grad.shape[:2], weight.shape[0]), torch.empty_like(state), torch.empty_like(grad_cell)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, state, cell, weight, bias, _ = inputs
        ctx.save_for_backward(state, weight, *output[:2])
        ctx.has_cell, ctx.has_bias = cell is not None, bias is not None

    def differentiate(ctx: Any, grad: Tensor, grad_reserved: Tensor, grad_cell: Tensor) -> tuple[Any, ...]:
        state, weight, result, reserved = ctx.saved_tensors
        one = getattr(torch.ops.paceline, f"{STEPS}_backward")
        grad_sums, grad_state, grad_cell = one(grad, grad_cell, state, weight, result, reserved)
        # The matrix's gradient is one product of all steps: its shapes count, not the states of before each step.
        rows = grad_sums.flatten(0, 1)
        grad_weight = rows.t() @ rows.new_empty(rows.shape[0], state.shape[-1])
        grad_bias = rows.sum(0) if ctx.has_bias else None
        return grad_sums, grad_state, grad_cell if ctx.has_cell else None, grad_weight, grad_bias, None

    library.register_fake(f"paceline::{STEPS}", forward)
    library.register_fake(f"paceline::{STEPS}_backward", backward)
    library.register_autograd(f"paceline::{STEPS}", differentiate, setup_context=save)
    operator: Callable[..., Any] = getattr(torch.ops.paceline, STEPS)
    return operator
