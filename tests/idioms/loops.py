"""What loops do around forward, backward and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.idioms.side import Found, Side, fit, idiom, mlp, state


@idiom()
def accumulation_by_counting(side: Side) -> Found:
    """As Accelerate's users write: one loop over batches, a step at every second, and at the last."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for index in range(5):
        x, y = side.batch(index)
        last = index % 2 == 1 or index == 4
        with contextlib.nullcontext() if last else side.no_sync(net):
            ((net(x) - y).square().mean() / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@idiom()
def accumulation_without_no_sync(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        for index in range(3):
            x, y = side.batch(10 * step + index)
            ((net(x) - y).square().mean() / 3).backward()
        side.clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(against="ddp", low=False)
def autocast(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            with torch.autocast("cpu", torch.bfloat16):
                answer = net(x)
            (answer - y).square().mean().div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def a_scaled_loss(side: Side) -> Found:
    return scaled(side, side.clip)


@idiom()
def a_scaled_loss_and_clipping_by_torch(side: Side) -> Found:
    return scaled(side, lambda model, largest: torch.nn.utils.clip_grad_norm_(model.parameters(), largest))


def scaled(side: Side, clip: Callable[[nn.Module, float], Tensor]) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = side.scaler(init_scale=1024.0)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            scaler.scale((net(x) - y).square().mean().div(side.micro)).backward()
        scaler.unscale_(optimizer)
        clip(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state(model)


@idiom()
def steps_skipped_when_the_loss_is_large(side: Side) -> Found:
    """A batch is left out after its forward, alike on all ranks."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x, y = side.batch(step)
        loss = (net(x) - y).square().mean()
        if step == 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def steps_skipped_after_the_backward(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def evaluation_between(side: Side) -> Found:
    """Under inference_mode, in the middle of an epoch, and by rank 0's part of the data alone."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    notes = []
    for _ in range(3):
        fit(side, net, optimizer, 1)
        model.eval()
        with torch.inference_mode():
            x, y = side.batch(77)
            notes.append(side.mean((net(x) - y).square().mean()))
        model.train()
    return {**state(model), "losses": torch.stack(notes)}


@idiom()
def a_look_at_everything_in_inference_mode(side: Side) -> Found:
    """Norms, gradients, states, copies of them, weights that are read and clamped, and a state that is loaded back."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)
    notes = []
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        with torch.inference_mode():
            notes.append(side.clip(model, 0.5).double())
            notes += [p.grad.abs().sum().double() for p in model.parameters()]
        optimizer.step()
        with torch.inference_mode():
            for held in optimizer.state.values():
                notes += [(2 * value.clone()).norm().double() for value in held.values() if value.dim()]
            with side.whole(model):
                notes += [p.square().sum().double() for p in model.parameters()]
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.zero_grad()
    return {**state(model), "notes": torch.stack(notes)}


@idiom()
def the_module_behind_a_wrapper(side: Side) -> Found:
    """`getattr(net, "module", net)`, and modules called one by one outside of the model's forward."""
    model = mlp(side)
    net = side.parallel(model)
    bare = getattr(net, "module", net)
    optimizer = torch.optim.SGD(bare.parameters(), 0.1)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with torch.no_grad(), side.whole(model):
            x, _ = side.batch(3)
            bare[-1](bare[:-1](x))
    return state(bare)


@idiom(low=False)
def a_compiled_block(side: Side) -> Found:
    torch.compiler.reset()
    model = mlp(side)
    for block in model[1:-1]:
        block.forward = torch.compile(block.forward, backend="eager")
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return state(model)


_MOVED = "moved to other memory, as model.share_memory"


@idiom(
    refused=(
        *((place, "was edited, but this rank updates") for place in ("low", "shared parameters", "zero 3")),
        *((place, _MOVED) for place in ("zero 1", "zero 2", "parameter server")),
    )
)
def shared_with_other_processes_half_way(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    model.share_memory()
    fit(side, net, optimizer, 2)
    return state(model)


@idiom(
    refused=tuple(
        (place, "optimizer.step\\(\\) inside backward") for place in (*(f"zero {zero}" for zero in range(4)), "low")
    )
)
def an_optimizer_for_each_parameter_that_steps_in_its_hook(side: Side) -> Found:
    """To hold one gradient at a time; DDP reduces after such hooks."""
    model = mlp(side)
    net = side.parallel(model)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for index in range(3):
        x, y = side.batch(index)
        (net(x) - y).square().mean().backward()
    return state(model)


@idiom()
def gradients_that_the_loop_reduces(side: Side) -> Found:
    """Under no_sync, and one all-reduce for each: what a loop does that sends them in a way of its own."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        for index in range(side.micro):
            x, y = side.batch(10 * step + index)
            with side.no_sync(net):
                ((net(x) - y).square().mean() / side.micro).backward()
        for p in model.parameters():
            p.grad.copy_(side.mean(p.grad))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def gradients_that_the_loop_reduces_as_one(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        x, y = side.batch(step)
        with side.no_sync(net):
            (net(x) - y).square().mean().backward()
        reduced = side.mean(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        for p, mine in zip(model.parameters(), reduced.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = mine.view_as(p).to(p.grad.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return state(model)
