"""Passes that are refused, as they cannot be followed: in transforms of `torch.func`, or with graphs of gradients."""

from __future__ import annotations

import torch

from paceline.core.errors import EngineError

_IN_TRANSFORM = "a transform of torch.func"


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running, whose tensors have neither graph nor memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_model() -> None:
    """Refuses the forward of a whole model, whose sharded parameters are to be gathered, where it is not followed.

    Raises:
        EngineError: It is inside a transform, or recorded by torch.jit.trace or torch.export.
    """
    if in_transform():
        raise EngineError(
            f"the model runs inside {_IN_TRANSFORM}, in which its parameters cannot be gathered: set strategy.zero to "
            "2 or less, or transform inside the model's forward, with strategy.accumulation hold"
        )
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        raise EngineError(
            "torch.jit.trace or torch.export of a model with zero=3, whose parameters are whole only while a unit "
            "runs: what is recorded would compute with placeholders. Record a plain copy, made by copy.deepcopy(model) "
            "on every rank, or set strategy.zero to 2 or less"
        )


def refuse_unit(unit: str, records: bool) -> None:
    """Refuses the forward of a unit that is to be resharded and gathered again, where nothing tells when.

    Args:
        unit: Its name.
        records: Whether the forward is one of training.

    Raises:
        EngineError: It is inside a transform, or derivatives in forward mode have a graph beside that of values.
    """
    in_forward_mode = records and torch.autograd.forward_ad._current_level >= 0
    if in_transform() or in_forward_mode:
        what = _IN_TRANSFORM if in_transform() else "torch.autograd.forward_ad.dual_level"
        raise EngineError(
            f"{unit} runs inside {what}, which paceline cannot follow to reshard its parameters and gather them "
            "again: set strategy.zero to 2 or less, or strategy.accumulation to hold"
        )


def refuse_graph(records: bool) -> None:
    """Refuses a forward where all parameters are whole, if it is one of training.

    Raises:
        EngineError: It is.
    """
    if not records:
        return
    if in_transform():
        raise EngineError(
            f"the model runs inside {_IN_TRANSFORM} inside pl.full_parameters, where no gradient is reduced: transform "
            "a plain copy, made by copy.deepcopy(model) on every rank, or with strategy.zero up to 2 outside of "
            "pl.full_parameters"
        )
    raise EngineError(
        "a forward with gradients inside pl.full_parameters, or while another thread is within model.state_dict(): its "
        "backward would not be reduced. Train outside of both; evaluate inside pl.full_parameters under torch.no_grad()"
    )


def refuse_graph_of_gradients(unit: str) -> None:
    """Refuses a backward that makes a graph of the gradients, where parameters are resharded.

    Raises:
        EngineError: It does.
    """
    if torch.is_grad_enabled():
        raise EngineError(
            f"backward with create_graph=True: the graph of the gradients uses {unit}'s parameters when they may have "
            "been resharded. Set strategy.zero to 2 or less, or strategy.accumulation to hold"
        )
