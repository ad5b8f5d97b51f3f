"""What loops do around forward, backward and step."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state


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


@idiom()
def clipping_by_value(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(refused=(("zero 1", "pl.clip_grad_norm_"), ("zero 2", "pl.clip_grad_norm_"), ("zero 3", "pl.clip_grad_norm_")))
def clipping_by_torch(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def gradients_edited_by_hand(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        for index, p in enumerate(model.parameters()):
            if p.grad is None:
                continue
            if index % 3 == 0:
                p.grad.mul_(0.5)
            elif index % 3 == 1:
                p.grad = p.grad * 2
            else:
                p.grad.data.clamp_(-0.1, 0.1)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    return state(model)


@idiom()
def gradients_of_some_layers_are_dropped(side: Side) -> Found:
    """Layers are frozen for a while by giving the optimizer no gradient."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        if step < 2:
            for p in model[0].parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(unused=True)
def layers_frozen_one_after_another(side: Side) -> Found:
    """requires_grad is switched off as training goes on."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        fit(side, net, optimizer, 1)
        model[step].requires_grad_(False)
    return state(model)


@idiom(unused=True)
def layers_frozen_and_trained_again(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model[0].requires_grad_(step % 2 == 0)
        fit(side, net, optimizer, 1)
    return state(model)


@idiom()
def learning_rates_by_depth_and_a_schedule(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    groups = [{"params": block.parameters(), "lr": 0.1 * 0.5**index} for index, block in enumerate(model)]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in groups], total_steps=4)
    for _ in range(4):
        fit(side, net, optimizer, 1)
        schedule.step()
    return state(model)


@idiom()
def a_group_is_added_later(side: Side) -> Found:
    """The head alone first, then all."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model[-1].parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    model.zero_grad()
    optimizer.add_param_group({"params": list(model[:-1].parameters()), "lr": 0.005})
    fit(side, net, optimizer, 2)
    return state(model)


@idiom()
def an_optimizer_is_replaced(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3), 2)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 2)
    return state(model)


@idiom(
    refused=(("zero 1", "zero to 0"), ("zero 2", "zero to 0"), ("zero 3", "zero to 0"), ("low", "float32")), low=False
)
def second_order_steps(side: Side) -> Found:
    """LBFGS."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, history_size=3)
    x, y = side.batch(0)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return state(model)


@idiom()
def a_step_with_a_closure(side: Side) -> Found:
    """As Lightning calls every optimizer."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        x, y = side.batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model)


@idiom(refused=tuple((place, "zero to 0|full_parameters") for place in ("zero 1", "zero 2", "zero 3", "low")))
def descent_by_hand(side: Side) -> Found:
    """No optimizer at all."""
    model = mlp(side)
    net = side.parallel(model)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
    return state(model)


@idiom(against="ddp", low=False, refused=(("zero 1", "."), ("zero 2", "."), ("zero 3", ".")))
def hooks_on_parameters(side: Side) -> Found:
    """A hook that scales a gradient, and one that looks at it after it has been added."""
    model = mlp(side)
    seen = []
    net = side.parallel(model)
    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda gradient, index=index: gradient * (1 + index % 2))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return {**state(model), "seen": torch.tensor(float(len(seen)))}


@idiom()
def hooks_on_tensors_and_modules(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    norms = []
    model[1].register_full_backward_hook(
        lambda module, into, out: norms.append(out[0].detach().double().square().sum())
    )
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model[2].register_forward_hook(lambda module, args, output: output + args[0])
    model[1].register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            answer = net(x)
            answer.register_hook(lambda gradient: gradient.mul(0.5))
            (answer - y).square().mean().div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(norms) == 3 * side.micro
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
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = side.scaler(init_scale=1024.0)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            scaler.scale((net(x) - y).square().mean().div(side.micro)).backward()
        scaler.unscale_(optimizer)
        side.clip(model, 0.5)
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


@idiom()
def two_optimizers_on_parts(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    first = torch.optim.AdamW(model[:2].parameters(), 0.01, eps=1e-3)
    second = torch.optim.SGD(model[2:].parameters(), 0.1)
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    return state(model)


@idiom()
def penalties_on_weights(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            loss = (net(x) - y).square().mean()
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(off=0.15)
def old_weights_hold_new_ones_back(side: Side) -> Found:
    """Elastic weight consolidation: a penalty on the distance from former weights."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 2)
    former = {name: value.to(side.dtype) for name, value in state(model).items()}
    for step in range(2):
        x, y = side.batch(20 + step)
        loss = (net(x) - y).square().mean()
        loss = loss + sum((p - former[name].to(p.dtype)).square().sum() for name, p in model.named_parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(low=False)
def a_compiled_block(side: Side) -> Found:
    torch.compiler.reset()
    model = mlp(side)
    for block in model[1:-1]:
        block.forward = torch.compile(block.forward, backend="eager")
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return state(model)


@idiom()
def an_embedding_grown_before(side: Side) -> Found:
    """Rows added and tied to the head before parallelize."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 6, bias=False)
            old = self.table
            self.table = nn.Embedding(7, WIDTH)
            with torch.no_grad():
                self.table.weight[:6].copy_(old.weight)
            self.head = nn.Linear(WIDTH, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens).cumsum(1).tanh())

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        tokens = side.rows((side.tensor(8, 5, seed=step).abs() * 3).long().clamp(max=6))
        logits = net(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def a_sparse_table(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, WIDTH, sparse=True), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.table((x[:, 0].abs() * 2).long().clamp(max=5)))

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return state(model)


@idiom(low=False, refused=tuple((f"zero {zero}", "SparseAdam takes sparse") for zero in range(4)))
def a_sparse_table_with_its_optimizer(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, WIDTH, sparse=True), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.table((x[:, 0].abs() * 2).long().clamp(max=5)))

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizers = [
        torch.optim.SparseAdam(model.table.parameters(), 0.01),
        torch.optim.Adam(model.head.parameters(), 0.01),
    ]
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@idiom(against="ddp", refused=(("zero 1", "."), ("zero 2", "."), ("zero 3", ".")), low=False)
def gradients_by_autograd_grad(side: Side) -> Found:
    """`p.grad = grad(...)`: DDP does not see this either; here it is what the user averages."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        loss = (net(x) - y).square().mean()
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = side.mean(gradient).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)
