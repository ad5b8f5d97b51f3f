"""A parameter that is not there to compute with: what touches its values asks the engine first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.weak import WeakIdKeyDictionary

from paceline.tensors.assigned_gradient import ReducedGradParameter
from paceline.tensors.calls import name_of, tensors_of, writes
from paceline.tensors.gradient_shard import GradientShard
from paceline.tensors.state_shard import StateShard

_DESCRIPTIONS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "grad_dtype", "is_leaf", "names"),
        *("_version", "itemsize", "nbytes", "ndim", "output_nr", "retains_grad", "_backward_hooks", "_base", "_cdata"),
        *("_grad", "_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse"),
        *("is_sparse_csr", "is_nested", "is_quantized", "is_mkldnn", "is_ipu", "is_xla", "is_vulkan", "is_maia"),
        *("is_mtia", "volatile", "name", "_has_symbolic_sizes_strides", "is_inference"),
    }
)
"""Attributes that tell of a tensor, not of its values."""

_QUESTIONS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_signed", "is_same_size", "is_inference", "is_pinned"),
        *("stride", "is_contiguous"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "storage_offset", "__hash__"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "has_names", "is_shared", "_is_view"),
        *(
            "grad",
            "backward",
            "_has_compatible_shallow_copy_type",
            "data_ptr",
            "untyped_storage",
            "_typed_storage",
            "is_conj",
            "is_neg",
        ),
        *("is_tensor", "is_storage", "is_nonzero_size", "result_type", "can_cast", "retain_grad", "__dir__"),
    }
)
"""Functions that do."""

_LAYOUTS = frozenset({"stride", "is_contiguous"})
"""Functions that tell how the whole lies in memory."""

_MADE_LIKE = frozenset({"type_as", "view_as", "reshape_as", "expand_as"})
"""Functions by which a tensor is made like another one, which tells of itself only."""


class Owner(Protocol):
    """The engine, as a sharded parameter asks it for its values."""

    def parameter_used(self, index: int, function: str, edits: bool, shape: Sequence[int] | None = None) -> None:
        """Makes a parameter whole, or raises.

        Args:
            index: Which parameter.
            function: Name of the function that is called with it.
            edits: Whether that function writes to it.
            shape: That of other data which it is about to be given, if it is.
        """
        ...

    def dtype_seen(self, index: int, computed: torch.dtype) -> torch.dtype:
        """The dtype that a parameter tells: between steps that of its update, by which optimizers load their states.

        Args:
            index: Which parameter.
            computed: The dtype that is computed with.
        """
        ...


class ShardedParameter(ReducedGradParameter):
    """A user's own parameter object while its values are elsewhere: sharded, on their way, or held in another dtype.

    An engine makes parameters of this class and plain again by assigning `__class__`; a plain parameter costs nothing.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the owner make parameters whole before a function computes with their values."""
        name, kwargs = name_of(func), kwargs or {}
        if name == "dtype":
            return _dtype(args[0])
        if name in _LAYOUTS and TracingContext.try_get() is None:
            # A compiler is told how what is there lies: its guards look at that, past this.
            with torch._C.DisableTorchFunctionSubclass():
                return func(_described(args[0]), *args[1:], **kwargs)
        if name in ("__repr__", "__format__"):
            parameter = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return f"Parameter containing: {parameter.dtype} of shape {tuple(parameter.shape)}, not gathered"
        if name not in _QUESTIONS and not _describes(func, name):
            given = args[:1] if name in _MADE_LIKE else (*args, *kwargs.values())
            written = {id(parameter) for parameter in tensors_of(_written(func, name, args, kwargs), ShardedParameter)}
            for parameter in {id(parameter): parameter for parameter in tensors_of(given, ShardedParameter)}.values():
                ask(parameter, name, id(parameter) in written, _given_shape(name, args))
            # What it is computed with may be a part of something, which goes with no whole parameter.
            for kind in (StateShard, GradientShard):
                if next(tensors_of((*args, *kwargs.values()), kind), None) is not None:
                    return kind.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter, with the values that were asked for."""
        ask(self, "deepcopy", False)
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().clone().as_subclass(Tensor), self.requires_grad)
        memo[id(self)] = copied
        return copied


_OURS = frozenset((nn.Parameter, ReducedGradParameter, ShardedParameter))
"""Classes between which a parameter changes: one of a user's own stays what it is."""

_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Whom each parameter of a parallel model asks, by which index, and its strides when it is whole; not kept on it, as it
may be copied and pickled."""
_NOBODY = (lambda: None, 0, None)


def ask(parameter: nn.Parameter, function: str, edits: bool, shape: Sequence[int] | None = None) -> None:
    """Lets the owner make a parameter whole before it is used: see `Owner.parameter_used`."""
    owner, index, _ = _OWNERS.get(parameter, _NOBODY)
    alive: Owner | None = owner()
    if alive is not None:
        alive.parameter_used(index, function, edits, shape)


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        owner, index, _ = _OWNERS.get(parameter, _NOBODY)
        alive: Owner | None = owner()
        return parameter.dtype if alive is None else alive.dtype_seen(index, parameter.dtype)


def _described(parameter: nn.Parameter) -> Tensor:
    """A tensor without memory that lies as the whole parameter does, and not as what stands in its place meanwhile."""
    *_, strides = _OWNERS.get(parameter, _NOBODY)
    if strides is None:
        return parameter
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")


def own(parameter: nn.Parameter, owner: Owner, index: int, strides: tuple[int, ...]) -> None:
    """Tells a parameter whom to ask while it is sharded, and how it lies when it is whole."""
    _OWNERS[parameter] = (weakref.ref(owner), index, strides)


def disown(parameter: nn.Parameter) -> None:
    """Makes a parameter a plain one for good."""
    unguard(parameter)
    _OWNERS.pop(parameter, None)


def guard(parameter: nn.Parameter) -> None:
    """Makes a parameter ask before it is used."""
    if type(parameter) in _OURS:
        parameter.__class__ = ShardedParameter


def unguard(parameter: nn.Parameter) -> None:
    """Makes a parameter a plain one."""
    if type(parameter) in _OURS:
        parameter.__class__ = nn.Parameter


def show(parameters: Iterable[nn.Parameter]) -> None:
    """Lets parameters be computed with, whose gradient a loop may set again to the shard of one that it has kept."""
    for parameter in parameters:
        if type(parameter) in _OURS:
            parameter.__class__ = ReducedGradParameter


def _describes(func: Callable[..., Any], name: str) -> bool:
    return name in _DESCRIPTIONS and getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def _written(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that a function writes to."""
    written = [kwargs["out"]] if "out" in kwargs else []
    if _edits(func, name) or kwargs.get("inplace"):
        # Initialisers of torch.nn.init name it.
        written += args[:1] or [kwargs.get("tensor")]
    return written


def _given_shape(name: str, args: tuple[Any, ...]) -> Sequence[int] | None:
    """The shape of what is assigned to a parameter's `data`."""
    return args[1].shape if name == "data" and len(args) > 1 and isinstance(args[1], Tensor) else None


def _edits(func: Callable[..., Any], name: str) -> bool:
    """Whether a function writes to its first argument."""
    return getattr(func, "__name__", "") == "__set__" or writes(name)
