"""Parameters that modules use in other ways than once each: shared, made by a network, empty, in a backward."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, Stack, descend, fit, idiom, mlp, state, trained


@idiom()
def a_shared_block_at_two_depths(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.first, self.second = shared, shared
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.second(x + self.first(x)))

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def losses_left_under_names_that_change(side: Side) -> Found:
    """Each block has its own, on itself, under the number of its call."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls, self.loss_0 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0, None

        def forward(self, x):
            delattr(self, f"loss_{self.calls}")
            self.calls += 1
            h = torch.tanh(self.a(x))
            setattr(self, f"loss_{self.calls}", self.b(h).square().mean())
            return x + h.detach()

    torch.manual_seed(0)
    model = Stack(Block, 3).to(side.dtype)
    net, optimizer = side.parallel(model), torch.optim.SGD(model.parameters(), 0.1)

    def loss(x, y):
        left = ((net(x) - y).square().mean(),)
        return sum((getattr(block, f"loss_{block.calls}") for block in model.blocks), *left)

    fit(side, net, optimizer, 3, loss)
    return state(model)


@idiom()
def weights_made_by_a_network(side: Side) -> Found:
    """A hypernetwork: the weights of a layer are computed, and used by functional_call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes = nn.Linear(3, 2 * WIDTH)
            self.layer = nn.Linear(WIDTH, 2)
            self.seed = nn.Parameter(torch.ones(3))

        def forward(self, x):
            weight = self.makes(self.seed).view(2, WIDTH)
            return torch.func.functional_call(self.layer, {"weight": weight + self.layer.weight}, (x,))

    torch.manual_seed(0)
    return trained(side, Model(), lr=0.05)


@idiom()
def complex_and_scalar_parameters(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gain = mlp(side), nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.body(x) * self.gain + self.empty.sum()

    return trained(side, Model())


@idiom(
    against="ddp",
    low=False,
    refused=(("zero 3", "all_gather cell .* a unit another number of times.* set strategy.accumulation to hold"),),
)
def a_cell_run_another_number_of_times_on_each_rank(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            x = self.first(x)
            for _ in range(1 + side.rank):
                x = x + self.other(self.cell(x))
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


class Adjoint(torch.autograd.Function):
    """Of an ODE: backward computes it again, and asks torch.autograd.grad for the gradients of its parameters."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        for _ in range(3):
            x = x + 0.3 * function(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = x = x.detach().requires_grad_()
            for _ in range(3):
                y = y + 0.3 * ctx.function(y)
            return (None, *torch.autograd.grad(y, [x, *parameters], gradient))


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


@idiom()
def the_adjoint_of_an_ode(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function, self.head = mlp(side, outputs=WIDTH), nn.Linear(WIDTH, 2)
            self.function[1].requires_grad_(False)

        def forward(self, x):
            return self.head(Adjoint.apply(self.function, x, *filter(_is_trained, self.function.parameters())))

    torch.manual_seed(0)
    return trained(side, Model())


class Equilibrium(nn.Module):
    """A layer that gives a fixed point of its cell, and solves for the point's gradient in a hook."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.state, self.given, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), pair

    def cell(self, z, x):
        return torch.tanh(0.3 * self.state(z) + self.given(x))

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.cell(z, x)
        if torch.is_grad_enabled():
            z = self.cell(z, x)
            start = z.detach().requires_grad_()
            again = self.cell(start, x.detach())

            def solve(gradient):
                solved = gradient
                for _ in range(20):
                    solved = torch.autograd.grad(again, start, solved, retain_graph=True)[0] + gradient
                return solved

            z.register_hook(solve)
        return (z, 2 * x) if self.pair else z


@idiom()
def layers_that_solve_for_their_gradient(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Equilibrium(False), Equilibrium(False)])
            self.pair, self.head = Equilibrium(True), nn.Linear(WIDTH, 2)

        def forward(self, x):
            x = self.before(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(sum(self.pair(x)))

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def a_view_that_a_unit_returns_is_written_to(side: Side) -> Found:
    """As residuals, masks and activations in place do, which take the view's own node out of the graph."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x):
            both = self.gate(x).sin()
            return both[:, :WIDTH], both.view(-1, 2, WIDTH)[:, 1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x):
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                half, other = block(x)
                half += x
                if number:
                    half.masked_fill_(half > 0.5, 0.5)
                    half.relu_()
                x = half * 1.0 if number == 1 else half + other
            x = self.last(x).view(-1, WIDTH)
            x += self.shift
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def a_model_with_a_switch_that_is_called_no_sync(side: Side) -> Found:
    """And that takes no attribute which it does not know."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.no_sync = mlp(side), nn.Linear(2, 2), False

        def __setattr__(self, name, value):
            if "_modules" in vars(self) and "no_sync" in vars(self) and not hasattr(self, name):
                raise AttributeError(f"no such setting: {name}")
            super().__setattr__(name, value)

        def forward(self, x):
            x = self.body(x)
            return self.head(x.detach() if self.no_sync else x)

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    descend(side, optimizer, lambda x, y: (net(x) - y).square().mean())
    copied = copy.deepcopy(model)
    model.no_sync = True
    descend(side, optimizer, lambda x, y: (net(x) - y).square().mean() + 0 * sum(p.sum() for p in model.parameters()))
    side.release(model)
    assert model.no_sync and not copied.no_sync
    return {**state(model), **state(copied, "copied ")}
