"""Advice where ranks did not meet in a collective: one ran something else, or ended."""

from __future__ import annotations

from paceline.comm.transport import CommunicationError, is_of_another
from paceline.core.ops import GRADIENT_NORM

_UNITS = (
    "the same units of it as often, with strategy.zero=3 (where each may run a unit another number of times, as a cell "
    "in a loop or experts and layers that it skips, set strategy.accumulation to hold, or name the module that holds "
    "these in strategy.units)"
)

ADVICE = {
    "forward": "A forward pass needs it: every rank must run the model equally often, in evaluation too, and "
    f"{_UNITS}. To run it on one rank alone, let every rank enter `with pl.full_parameters(model):` and that one run "
    "it there, under torch.no_grad()",
    "backward": "A backward pass needs it: every rank must take as many steps, of as many micro-batches, and run "
    f"{_UNITS}. Where steps or micro-batches may differ, loop over pl.accumulate(model, batches, uneven=True)",
    "update": "optimizer.step() needs it: every rank must call that equally often",
    "model.state_dict()": "Every rank must call model.state_dict(), as save_pretrained does; one of them may write "
    "the file",
    "model.load_state_dict()": "Every rank must call model.load_state_dict()",
    "copy.deepcopy(model)": "Every rank must call copy.deepcopy(model), or torch.save(model)",
    "pl.full_parameters": "Every rank must enter and leave `with pl.full_parameters(model):`; one of them may do the "
    "work inside",
    GRADIENT_NORM: "Every rank must call pl.clip_grad_norm_",
    "p.grad": "Each rank holds a shard of a gradient, and the whole is gathered where a loop looks at all of it (a "
    "sum, rows, arithmetic with a tensor of the parameter's shape): every rank must do so, and one may print that",
    "optimizer.state": "Each rank holds shards of an optimizer's states, and the whole is gathered where a loop looks "
    "at all of one or writes to its rows: every rank must do so, and one may print that",
    "pl.broadcast_buffers": "Every rank must call pl.broadcast_buffers",
    "pl.release": "Every rank must call pl.release",
}
"""By an op's target or the phase that it is of, or by the call outside of a step that a collective belongs to."""


def advised(error: CommunicationError, purpose: str, contents: str | None = None) -> CommunicationError:
    """The same error with what was communicated and, if ranks did not meet, what to do.

    Args:
        error: What a transport raised.
        purpose: A key of `ADVICE`; others have none.
        contents: Which parameters the buffer holds, in words.
    """
    advice = "" if is_of_another(error) else ADVICE.get(purpose, "")
    return type(error)(". ".join(filter(None, ("; ".join(filter(None, (str(error), contents))), advice))))
