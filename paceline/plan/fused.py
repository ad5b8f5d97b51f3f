"""The kernels that a device has for attention, norms and recurrent layers, in place of the planning machine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.plan.padded import REPLACED, is_packed, recur_packed
from paceline.plan.recurrent import is_recurrent, recurrent

aten = torch.ops.aten

_SDPA, _RMS_NORM = F.scaled_dot_product_attention, F.rms_norm


class FusedKernels(TorchFunctionMode):
    """Calls the operators that a GPU would run: attention without a matrix of scores, RMSNorm as one kernel,
    recurrent layers with all steps of time in one.

    On CPUs what torch chooses for this machine's is right, and nothing is changed. Packed sequences are padded on both.
    """

    def __init__(self, device: str) -> None:
        """Takes the type of the device that is planned for."""
        super().__init__()
        self._cuda = device == "cuda"
        self._replaced = ExitStack()

    def __enter__(self) -> FusedKernels:
        """Replaces them by name, too: torch's own functions, and checkpoints in backward, call them with modes off."""
        if self._cuda:
            self._replaced.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
            self._replaced.enter_context(patch.object(F, "rms_norm", _rms_norm))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Puts torch's own back."""
        super().__exit__(*raised)
        self._replaced.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._cuda and func is _SDPA:
            return _attention(*args, **kwargs)
        if self._cuda and func is _RMS_NORM:
            return _rms_norm(*args, **kwargs)
        if is_recurrent(func) and len(args) == 9:
            steps: Callable[..., Any] = partial(recurrent, func) if self._cuda else func
            return recur_packed(steps, *args) if is_packed(args) else steps(*args, **kwargs)
        if (padded := REPLACED.get(getattr(func, "__name__", ""))) is not None:
            return padded(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` runs on a GPU: FlashAttention in half precision without a mask, else the
    memory-efficient kernel, which takes masks and fp32, but as many heads of keys as of queries.
    """
    if query.dim() != 4:
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]:
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needed = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    result = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needed, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return result
