"""Residuals of error feedback: what encoding left out of the messages that were sent from one buffer."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.cpu.codecs import Codec

Key = tuple[str, str, float, int, int, int]
"""A message: collective, label, scale, stage, where in the memory it begins, in bytes, and its elements. It is the same
in every job of the same ranks and program."""

SavedResiduals = list[tuple[Key, Tensor]]
"""The residual of each message."""


class Residuals:
    """Keeps the residuals of the messages of one buffer, each made when it is first sent.

    Attributes:
        kept: By message.
    """

    def __init__(self, start: int, before: dict[Key, Tensor]) -> None:
        """Nothing was sent yet.

        Args:
            start: Address of the memory that the buffer lies in.
            before: Residuals of another job, to be taken over when a message is first sent.
        """
        self._start, self._before = start, before
        self.kept: dict[Key, Tensor] = {}

    def of(self, name: str, label: str, scale: float, stage: int, source: Tensor, codec: Codec) -> Tensor | None:
        """The residual of a message that is sent from `source`; None where the codec keeps nothing."""
        key = (name, label, scale, stage, source.data_ptr() - self._start, source.numel())
        if key not in self.kept and (residual := codec.residual(source.numel())) is not None:
            self.kept[key] = residual
            self.take_over(key)
        return self.kept.get(key)

    def take_over(self, key: Key) -> None:
        """The residual of a message becomes that of another job, or zero."""
        residual, before = self.kept[key], self._before.pop(key, None)
        if before is None or before.shape != residual.shape:
            residual.zero_()
        else:
            residual.copy_(before)
