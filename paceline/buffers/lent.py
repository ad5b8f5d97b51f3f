"""Memory that a loop shares with parameters for a while, in `pl.full_parameters` or by `p.data = t`, and keeps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.buffers.storage_uses import used_elsewhere
from paceline.buffers.weights_hash import weights_hash
from paceline.core.errors import EngineError


class Lent:
    """What is kept of it: parameters are gathered to the same memory again, and what is written there else is refused.

    In plain PyTorch such a tensor is the parameter's memory for good. Where parameters are sharded, or updated in
    another dtype, it is so inside of `pl.full_parameters` alone.
    """

    def __init__(self, contents: Mapping[str, str]) -> None:
        """Nothing is.

        Args:
            contents: What each bucket holds, in words, by its name.
        """
        self._contents = contents
        self._kept: dict[str, tuple[Tensor, int]] = {}

    def memory(self, bucket: str) -> Tensor | None:
        """Where a bucket is gathered to, if a loop still has tensors of that memory."""
        self._forget_unused()
        found = self._kept.pop(bucket, None)
        return None if found is None else found[0]

    def keep(self, memory: Mapping[str, Tensor]) -> None:
        """Parameters are about to leave memory that a loop has tensors of.

        Args:
            memory: By the bucket or the parameter that it was.
        """
        self._kept |= {name: (each, weights_hash([each])) for name, each in memory.items()}

    def require_unedited(self) -> None:
        """Refuses to go on where somebody has written to it meanwhile, which reaches no parameter.

        Raises:
            EngineError: Somebody did.
        """
        self._forget_unused()
        for name, (memory, expected) in self._kept.items():
            if weights_hash([memory]) != expected:
                raise EngineError(
                    f"{self._contents.get(name, name)}: a tensor that was taken of it inside `with "
                    "pl.full_parameters(model):`, or given to it by p.data = ..., was written to outside of that, "
                    "where it is not the parameter's memory: write to p inside `with pl.full_parameters(model):`, and "
                    "keep p.detach().clone() of what is only read"
                )

    def _forget_unused(self) -> None:
        used = used_elsewhere({name: memory for name, (memory, _) in self._kept.items()})
        self._kept = {name: self._kept[name] for name in used}
