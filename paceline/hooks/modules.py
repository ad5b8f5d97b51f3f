"""Module hooks and hooks on their outputs' gradients, turned into the engine's few verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import EngineError, UserError
from paceline.hooks.checkpointed import require_whole
from paceline.hooks.jit_traces import WithoutGradients
from paceline.hooks.outputs import tensors_in
from paceline.hooks.units_under_way import UnitsUnderWay
from paceline.tensors.untraced import untraced


class Listener(Protocol):
    """The calls that hooks make. Units are told by name.

    `records` says whether a forward is part of training: one with a graph, or inside a reentrant checkpoint. Others
    (evaluation, activations computed again inside backward) are told because parameters are needed whole there too.
    """

    def root_pre_forward(self, records: bool) -> None:
        """The whole model's forward begins."""
        ...

    def root_post_forward(self, records: bool) -> int:
        """The whole model's forward has ended; returns the generation of the weights it used."""
        ...

    def pre_forward(self, unit: str, records: bool) -> None:
        """A unit's forward begins."""
        ...

    def post_forward(self, unit: str, records: bool, backward_follows: bool) -> int:
        """A unit's forward has ended, with or without a graph; returns the generation of the weights it used."""
        ...

    def own_outputs(
        self, unit: str, output: Any, filled: Iterable[Tensor], backward_follows: bool
    ) -> tuple[Any, Iterable[Tensor], Iterable[Tensor]]:
        """Returns a unit's output without views of its parameters, and the other tensors that it leaves.

        Those on its parts, then those of its inside that others may have, of which `filled` are in what it was given.
        """
        ...

    def in_forward(self) -> bool:
        """Whether a forward of the whole model is under way, of which this may be a part."""
        ...

    def first_output_gradient(self, unit: str, generation: int) -> None:
        """The first gradient of a unit with several outputs is there, or one of what others have of its inside."""
        ...

    def pre_backward(self, unit: str | None, generation: int) -> None:
        """The backward of a unit begins, or (None) that of the whole model."""
        ...

    def wants_backward(self, unit: str) -> bool:
        """Whether the backward of a forward with a graph, in training or computed again, is to be told of."""
        ...


class ModuleHook:
    """A hook of one module of a parallel model: in a copy of the model, and in a file, it does nothing.

    An object and not a closure, as copies and files of a model take its hooks along.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        """Calls `call` with what torch gives the hook."""
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module.register_forward_hook` and the like."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        """A copy is no part of the parallel model."""
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Pickles as a hook that does nothing: a model from a file is no part of the parallel one."""
        return (_no_hook, ())


def no_hook(*args: Any, **kwargs: Any) -> None:
    """Does nothing: what a copy of a parallel model has in place of its hooks."""


def _no_hook() -> Callable[..., None]:
    return no_hook


def install(
    model: nn.Module, units: Mapping[str, nn.Module], listener: Listener, under_way: UnitsUnderWay
) -> list[RemovableHandle]:
    """Registers hooks on a model and its units; the handles remove them.

    A unit's backward begins when the gradients of all its outputs are there; the parameters of every unit that ran
    after it then have theirs, unless they are used elsewhere too. `under_way` is told which units run inside which.
    """
    handles = [handle for name, module in units.items() for handle in _listen(model, module, name, listener, under_way)]

    def root_pre_forward(module: nn.Module, args: Any) -> None:
        listener.root_pre_forward(_records())

    def root_post_forward(module: nn.Module, args: Any, output: Any) -> None:
        generation = listener.root_post_forward(_records())
        if _records():
            _on_gradients(tensors_in(output), "any", lambda: listener.pre_backward(None, generation))

    handles.append(model.register_forward_pre_hook(ModuleHook(untraced(root_pre_forward)), prepend=True))
    handles.append(model.register_forward_hook(ModuleHook(untraced(root_post_forward))))
    traces = WithoutGradients()
    handles.append(model.register_forward_pre_hook(ModuleHook(untraced(traces.begin)), prepend=True))
    handles.append(model.register_forward_hook(ModuleHook(untraced(traces.end)), always_call=True))
    return handles


def open_for_states(
    model: nn.Module, enter: Callable[[bool], None], leave: Callable[[], None]
) -> list[RemovableHandle]:
    """Calls `enter` before and `leave` after `state_dict` and `load_state_dict` of a model or a part of it.

    `enter` is told whether parameters will be written to.
    """
    reads = ModuleHook(lambda module, *rest: enter(False))
    writes = ModuleHook(lambda module, *rest: enter(True))
    after = ModuleHook(lambda module, *rest: leave())
    return [
        handle
        for part in model.modules()
        for handle in (
            part.register_state_dict_pre_hook(reads),
            part.register_state_dict_post_hook(after),
            part.register_load_state_dict_pre_hook(writes),
            part.register_load_state_dict_post_hook(after),
        )
    ]


def require_hooks(model: nn.Module) -> None:
    """Refuses a model that cannot tell when its parts run.

    Raises:
        UserError: A part is TorchScript.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UserError(
                f"parallelize: {name or 'the model'} is TorchScript, which takes no hooks: leave out torch.jit.script "
                "and torch.jit.trace, or compile it with torch.compile"
            )


def refuse_other_parameters(model: nn.Module) -> list[RemovableHandle]:
    """Lets `load_state_dict` of a model or a part of it refuse, before it changes anything, to put others in place.

    The handles end that.
    """

    def before(module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise EngineError(
                "load_state_dict(assign=True) after pl.parallelize would put other parameters in the place of the "
                "parallel ones: leave out assign=True, which copies the values, or load before pl.parallelize"
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise EngineError(
                "load_state_dict under torch.__future__.set_swap_module_params_on_conversion(True), after "
                "pl.parallelize, would swap the parallel parameters for others: set it to False meanwhile, which "
                "copies the values"
            )

    hook = ModuleHook(before)
    return [part.register_load_state_dict_pre_hook(hook) for part in model.modules()]


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (activations are being recomputed, say)."""
    return bool(torch._C._current_graph_task_id() != -1)


def packs_saved_tensors() -> bool:
    """Whether hooks take what autograd saves, as in a checkpoint that computes it again for a backward under way."""
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))


def _records() -> bool:
    return torch.is_grad_enabled() and not in_backward()


def _listen(
    model: nn.Module, unit: nn.Module, name: str, listener: Listener, under_way: UnitsUnderWay
) -> list[RemovableHandle]:
    given: set[Any] = set()
    began = 0

    # A reentrant checkpoint runs its part of the forward without gradients, and again inside backward with them.
    def records() -> bool:
        return not in_backward() and (torch.is_grad_enabled() or listener.in_forward())

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal began
        under_way.begin(name)
        began = torch._C._autograd._get_sequence_nr()
        given.clear()
        inputs = list(tensors_in((args, kwargs)))
        require_whole(model, name, inputs)
        given.update(tensor.grad_fn for tensor in inputs)
        listener.pre_forward(name, records())

    def post_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        graph = torch.is_grad_enabled()
        follows = graph and listener.wants_backward(name)
        filled = (tensor for tensor in tensors_in((args, kwargs)) if tensor.grad_fn not in given)
        kept, more, inside = listener.own_outputs(name, output, filled, follows)
        generation = listener.post_forward(name, records(), follows)
        if follows:
            # What it only hands on is not its own: that tensor's gradient comes when earlier units have theirs.
            own = [tensor for tensor in (*tensors_in(kept), *more) if tensor.grad_fn not in given]
            inside = [tensor for tensor in inside if tensor.grad_fn not in given]
            given.clear()

            def first_gradient() -> None:
                listener.first_output_gradient(name, generation)

            for tensor in inside:
                # Each by itself, as the unit's backward has begun by then.
                _on_gradients([tensor], "all", first_gradient)
            pre_backward = partial(listener.pre_backward, name, generation)
            _on_gradients(_written_to(own or inside, began), "all", pre_backward, first_gradient)
        return None if kept is output else kept

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        under_way.end(name)

    # First of all hooks: others, such as weight normalisation's, compute with the parameters.
    before = unit.register_forward_pre_hook(ModuleHook(untraced(pre_forward)), prepend=True, with_kwargs=True)
    after = unit.register_forward_hook(ModuleHook(untraced(post_forward)), with_kwargs=True)
    # Where it fails, too.
    return [before, after, unit.register_forward_hook(ModuleHook(untraced(end_forward)), always_call=True)]


def _written_to(outputs: Iterable[Tensor], began: int) -> list[Tensor]:
    """What a unit returns, or where that is a view of what it has computed itself, the latter.

    Who writes to a view in place (`x = block(x); x += y`) takes the view's own node out of the graph, hooks and all:
    autograd then goes on to its base as that was before.

    Args:
        outputs: The unit's.
        began: The number of the first node that its forward could make.
    """
    found: dict[int, Tensor] = {}
    for each in outputs:
        base = each._base if each.grad_fn is not None and each._is_view() else None
        if base is not None and base.grad_fn is not None and base.grad_fn._sequence_nr() >= began:
            found[id(base)] = base
        else:
            found[id(each)] = each
    return list(found.values())


def _on_gradients(
    outputs: Iterable[Tensor], mode: str, action: Callable[[], None], at_first: Callable[[], None] | None = None
) -> None:
    """Calls `action` once per backward pass, when any or all gradients of `outputs` are there.

    `at_first` is called before, when there are several and the first is.
    """
    # A parameter that is itself an output has nothing before it, and hooks on it would stay for good.
    tensors = [tensor for tensor in outputs if tensor.grad_fn is not None]
    # They may be called in the middle of what is being compiled, too.
    action = untraced(action)
    users = [list(tensor._backward_hooks or ()) for tensor in tensors]
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: action())
    elif tensors:
        if at_first is not None:
            first = untraced(at_first)
            register_multi_grad_hook(tensors, lambda gradient: first(), mode="any")
        register_multi_grad_hook(tensors, lambda gradients: action(), mode=mode)  # type: ignore[arg-type]
    for tensor, earlier in zip(tensors, users, strict=True):
        # Those of the unit's own forward come after: they may run backward through its inside, as of an equilibrium.
        hooks = tensor._backward_hooks or {}
        for key in earlier:
            hooks[key] = hooks.pop(key)
