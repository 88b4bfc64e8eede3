"""torch.func: gradients of each sample, ensembles, inner loops, and derivatives with respect to the inputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, stack_module_state, vmap

from clients.compatibility.parts import batches_of, network
from clients.compatibility.suite import Train, idiom
from gpumux.errors import UnsupportedOperator

Params = dict[str, Tensor]


@idiom("gradients of each sample by vmap(grad), clipped and with noise (differential privacy)")
def per_sample(train: Train) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of(6)

    def loss_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {name: p.detach() for name, p in model.named_parameters()}
        found = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()], 1).norm(dim=1)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            total = torch.einsum("b,b...->...", factor, found[name])
            p.grad = (total + 0.5 * torch.randn_like(total)) / len(x)
        optimizer.step()
        found_norm: Tensor = norms.mean()
        return found_norm

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("an ensemble as one call: stack_module_state and vmap(functional_call), its parameters in the optimizer")
def ensemble(train: Train) -> Any:
    models = [network() for _ in range(3)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(list(params.values()), lr=1e-2)
    batches = batches_of(6)

    def call(params: Params, buffers: Params, x: Tensor) -> Any:
        return functional_call(base, (params, buffers), (x,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        outputs = vmap(call, in_dims=(0, 0, None))(params, buffers, x)
        loss = torch.stack([F.cross_entropy(one, y) for one in outputs]).sum()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], dict(params)


@idiom("MAML with torch.func: inner steps by grad(functional_call), vmap over the tasks")
def inner_loop(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, params, (x,)), y)

    def task(x: Tensor, y: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        params: Params = {name: p for name, p in model.named_parameters()}  # noqa: C416 - for the type
        for _ in range(2):
            gradients = grad(loss_of)(params, x, y)
            params = {name: p - 0.1 * gradients[name] for name, p in params.items()}
        return loss_of(params, query, answer)

    def step(*tasks: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = vmap(task)(*tasks).mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [tuple(torch.randn(3, 4, 1) for _ in range(4)) for _ in range(6)]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model


def _equation(train: Train, second: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Any:
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            found: Tensor = model(point.unsqueeze(0)).squeeze()
            return found

        optimizer.zero_grad()
        laplacian = vmap(lambda point: torch.trace(second(u)(point)))(x)
        loss = (laplacian - torch.sin(x[:, 0])).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [torch.rand(5, 2) for _ in range(6)]
    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(x).item() for x in batches], model


@idiom("a differential equation's residual by vmap(jacrev(jacrev(u)))")
def reverse_twice(train: Train) -> Any:
    return _equation(train, lambda u: jacrev(jacrev(u)))


@idiom(
    "a differential equation's residual by vmap(hessian(u)), which differentiates in forward mode",
    refused=UnsupportedOperator,
    instead="jacrev(jacrev(u)), or autograd.grad(..., create_graph=True)",
    changed=reverse_twice,
)
def forward_mode(train: Train) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's, which forward mode uses
        return _equation(train, hessian)


@idiom("a physics-informed network: autograd.grad(u, t, create_graph=True) at points that require grad, in a closure")
def collocation(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    viscosity = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([*model.parameters(), viscosity], lr=1e-2)
    x, t = (torch.rand(8, 1, requires_grad=True) for _ in range(2))

    def derivative(of: Tensor, by: Tensor) -> Tensor:
        return torch.autograd.grad(of, by, grad_outputs=torch.ones_like(of), create_graph=True)[0]

    def step(known: Tensor, values: Tensor) -> Tensor:
        optimizer.zero_grad()
        u = model(torch.cat([x, t], 1))
        slope = derivative(u, x)
        residual = derivative(u, t) + u * slope - 0.01 * torch.exp(viscosity) * derivative(slope, x)
        loss: Tensor = (model(known) - values).square().mean() + residual.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.rand(4, 2), torch.rand(4, 1)) for _ in range(6)]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model, viscosity
