"""What a script can do between two steps, as lines of Python.

Names that the lines may use: `model`, `optimizer`, `train(count)` (gives the losses), `update()`, `predict(x)`,
`again()` (submits again, then closes the older job), `batch(index)`, `local_loss()`, `params()`, `job` (None in the
plain loop), `note(value)` (what is noted is compared), `kept` (a dictionary whose tensors are compared in the end),
`torch`, `nn`, `F`, `copy`, `io`, `DataLoader`, `TensorDataset`, and `p` and `k`: a parameter and a small number, chosen
when a sequence is made.

An operation is dropped from a sequence if it raises in the plain loop.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    lines: str
    weight: float = 1.0


def _each(text: str, weight: float = 1.0) -> tuple[Operation, ...]:
    """Operations that are parted by empty lines."""
    return tuple(Operation(textwrap.dedent(part).strip("\n"), weight) for part in text.strip("\n").split("\n\n"))


STEPS = _each("""
train(1)

train(2)

train(3)

note([loss.item() for loss in train(2)])

note(float(train(1)[0]))
""", 8) + _each("""
update()

train(1); update()

optimizer.zero_grad(); train(1); update()

train(2); update(); optimizer.zero_grad()

x, y = batch(k); train(1, batches=[(x + 0.1 * torch.randn_like(x), y)] if x.is_floating_point() else [(x, y)])
""", 3) + _each("""
note(predict(batch(k)[0]))

model.eval(); note(predict(batch(k)[0])); model.train()

x, y = batch(k); train(1, batches=[(x[:3], y[:3])])

train(1); job and job.sync()

again()

train(1); again()
""")  # fmt: skip

READS = _each("""
note(p.sum())

note(p.data.norm())

note(p.detach().flatten()[0].item())

note(p.tolist())

note(repr(p))

note(p.detach().numpy().tolist())

note(nn.utils.parameters_to_vector(model.parameters()))

note(copy.deepcopy(model).state_dict())

note([b.clone() for b in model.buffers()])

note(torch.stack([q.detach().abs().mean() for q in params()]))

note(torch._foreach_norm(params()))

note(torch.histc(p.detach(), 4))

note(optimizer.state_dict()["state"])

note([v for s in optimizer.state.values() for v in s.values()])

note(len(optimizer.state))

note(p in optimizer.state)

note(list(optimizer.state[p].values()) if p in optimizer.state else None)

note(copy.deepcopy(optimizer).state_dict())

note(p.grad is None)

note([q.grad is None for q in params()])

note(None if p.grad is None else p.grad.norm())

note(None if p.grad is None else p.grad.tolist())

note(None if p.grad is None else tuple(p.grad.shape))

note([None if q.grad is None else q.grad.clone() for q in params()])

note(nn.utils.get_total_norm([q.grad for q in params() if q.grad is not None]))

note(local_loss())

note(model(batch(k)[0]))

with torch.no_grad(): note(model(batch(k)[0]))

model.eval(); note(local_loss()); model.train()

note(torch.autograd.grad(local_loss(), params(), allow_unused=True))

note(F.dropout(p.detach(), 0.5))

note(torch.randn(3))

note(torch.rand(17))

note(torch.randperm(7))

note(torch.get_rng_state())

note(torch.randn_like(p))

note([x for x, in DataLoader(TensorDataset(torch.arange(7)), batch_size=3, shuffle=True)])

note([x for x, in DataLoader(TensorDataset(torch.arange(4)))])

with torch.random.fork_rng(): torch.manual_seed(k); note(torch.rand(2))

note(torch.initial_seed())

torch.save(model.state_dict(), io.BytesIO())
""")

KEPT = _each("""
kept["data"] = p.data

kept["detached"] = p.detach()

kept["view"] = p.view(-1)

kept["row"] = p.detach()[0]

kept["parameter"] = p

kept["state"] = model.state_dict()

kept["buffers"] = list(model.buffers())

kept["grad"] = p.grad

kept["grad data"] = None if p.grad is None else p.grad.data

kept["grad view"] = None if p.grad is None else p.grad.view(-1)

kept["grads"] = [q.grad for q in params()]

kept["moments"] = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]

kept["optimizer"] = optimizer.state_dict()

kept["optimizer then"] = copy.deepcopy(optimizer.state_dict())

kept["model then"] = copy.deepcopy(model.state_dict())

kept["generator"] = torch.get_rng_state()

kept["loss"] = train(1)[0]

kept["graph"] = local_loss()

for name in ("data", "detached", "view", "row", "parameter", "buffers", "moments"): note(kept.get(name))

for name in ("grad", "grads", "grad data", "grad view", "mine", "flat"): note(kept.get(name))
""")

GRADIENTS = _each("""
p.grad = None

del p.grad

for q in params(): q.grad = None

optimizer.zero_grad()

optimizer.zero_grad(set_to_none=False)

model.zero_grad()

model.zero_grad(set_to_none=False)

if p.grad is not None: p.grad.zero_()

p.grad = torch.full_like(p, 0.1 * k)

for q in params(): q.grad = torch.full_like(q, 0.1 * k)

p.grad = torch.randn_like(p)

if p.grad is not None: p.grad.mul_(0.5)

if p.grad is not None: p.grad *= 0.5

if p.grad is not None: p.grad = p.grad * 0.5

if p.grad is not None: p.grad.add_(p.detach(), alpha=0.1)

if p.grad is not None: p.grad.data.mul_(0.5)

if p.grad is not None: p.grad.data = torch.full_like(p, 0.05)

if p.grad is not None: p.grad.data = p.grad.data.clone()

if p.grad is not None: p.grad.detach().clamp_(-0.01, 0.01)

if p.grad is not None: p.grad[0] = 0.25

if p.grad is not None: p.grad.view(-1)[0] = 0.25

if p.grad is not None: p.grad.copy_(torch.full_like(p, 0.02))

if p.grad is not None: p.grad.numpy()[...] *= 0.5

if p.grad is not None: p.grad = p.grad.clone()

if p.grad is not None and p.dim() == 2: p.grad = p.grad.t().contiguous().t()

if p.grad is not None: p.grad.add_(torch.randn_like(p), alpha=0.01)

if p.grad is not None: p.grad.requires_grad_(False).div_(2)

nn.utils.clip_grad_norm_(model.parameters(), 0.1)

nn.utils.clip_grad_value_(model.parameters(), 0.01)

with torch.no_grad(): torch._foreach_mul_([q.grad for q in params() if q.grad is not None], 0.5)

kept["away"] = [q.grad for q in params()]; model.zero_grad()

for q, g in zip(params(), kept.pop("away", [])): q.grad = g

kept["one away"] = (p, p.grad); p.grad = None

if "one away" in kept: kept["one away"][0].grad = kept.pop("one away")[1]

kept["saved"] = [None if q.grad is None else q.grad.clone() for q in params()]

for q, g in zip(params(), kept.get("saved", [])): q.grad = None if g is None else g.clone()

kept["mine"] = torch.full_like(p, 0.1 * k); p.grad = kept["mine"]

if "mine" in kept: kept["mine"].mul_(0.5)

if "mine" in kept: kept["mine"].data.add_(0.1)

if "mine" in kept: note(kept["mine"])

if kept.get("grad") is not None: kept["grad"].mul_(0.5)

kept["flat"] = torch.zeros(sum(q.numel() for q in params()))
for q, g in zip(params(), kept["flat"].split([q.numel() for q in params()])):
    if q.grad is not None: g.copy_(q.grad.flatten())
    q.grad = g.view_as(q)

if "flat" in kept: kept["flat"].mul_(0.5)

if "flat" in kept: kept["flat"].zero_()

if "flat" in kept: note(kept["flat"].sum())

local_loss().backward()

sum(q.pow(2).sum() for q in params()).backward()

(2 * p).sum().backward()

for q, g in zip(params(), torch.autograd.grad(local_loss(), params())): q.grad = g

kept["handle"] = p.register_hook(lambda g: g * 0.5)

kept["handle"] = p.register_post_accumulate_grad_hook(lambda q: q.grad.mul_(0.5))

if "handle" in kept: kept.pop("handle").remove()
""")

PARAMETERS = _each("""
with torch.no_grad(): p.mul_(0.99)

p.data.clamp_(-0.2, 0.2)

p.data[0] = 0.1

p.data = p.data.clone()

p.detach().add_(0.01)

with torch.no_grad(): p.copy_(torch.full_like(p, 0.05))

nn.init.normal_(p, std=0.1)

nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).mul(0.9), model.parameters())

with torch.no_grad(): torch._foreach_mul_(params(), 0.9)

p.detach().numpy()[...] *= 0.5

if "data" in kept: kept["data"].mul_(0.9)

if "buffers" in kept and kept["buffers"]: kept["buffers"][0].mul_(0.9)

model.load_state_dict(copy.deepcopy(model.state_dict()))

model.load_state_dict(model.state_dict())

if "model then" in kept: model.load_state_dict(kept["model then"])

if "state" in kept: model.load_state_dict(kept["state"])

file = io.BytesIO()
torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
kept["file"] = file.getvalue()

if "file" in kept:
    one, two, three = torch.load(io.BytesIO(kept["file"]))
    model.load_state_dict(one); optimizer.load_state_dict(two); torch.set_rng_state(three)

for b in model.buffers(): note(b.sum())

for b in model.buffers(): b.zero_()

for m in model.modules():
    if hasattr(m, "reset_running_stats"): m.reset_running_stats()

for m in model.modules():
    if hasattr(m, "momentum"): m.momentum = 0.05 * k

for m in model.modules():
    if isinstance(m, nn.Dropout): m.p = 0.1 * k

model.eval()

model.train()

p.requires_grad_(False)

p.requires_grad_(True)

model.requires_grad_(True)

kept["average"] = copy.deepcopy(model)

if "average" in kept:
    with torch.no_grad():
        for a, q in zip(kept["average"].parameters(), params()): a.lerp_(q, 0.1)

kept["averaged"] = torch.optim.swa_utils.AveragedModel(model)

if "averaged" in kept: kept["averaged"].update_parameters(model)

kept["hook"] = model.register_forward_hook(lambda module, args, out: out * 0.5)

kept["hook"] = model.register_forward_pre_hook(lambda module, args: None)

if "hook" in kept: kept.pop("hook").remove()

with torch.no_grad(): p.copy_(p.flip(0))

model.to("cpu"); model.float()
""")

OPTIMIZER = _each("""
optimizer.param_groups[0]["lr"] *= 0.5

for group in optimizer.param_groups: group["lr"] = 0.01 * k

kept["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

kept["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

if "schedule" in kept: kept["schedule"].step(); note(kept["schedule"].get_last_lr())

if "weight_decay" in optimizer.param_groups[0]: optimizer.param_groups[0]["weight_decay"] = 0.01 * (k % 2)

if "maximize" in optimizer.param_groups[0]: optimizer.param_groups[0]["maximize"] = k % 2 == 1

if "betas" in optimizer.param_groups[0]: optimizer.param_groups[0]["betas"] = (0.8, 0.9)

if "momentum" in optimizer.param_groups[0]: optimizer.param_groups[0]["momentum"] = 0.1 * k

optimizer.step()

optimizer.zero_grad(); local_loss().backward(); optimizer.step()

for s in optimizer.state.values():
    for v in s.values():
        if isinstance(v, torch.Tensor) and v.dim(): v.mul_(0.5)

if p in optimizer.state:
    for v in optimizer.state[p].values(): isinstance(v, torch.Tensor) and v.zero_()

for name, v in optimizer.state.get(p, {}).items():
    if isinstance(v, torch.Tensor): optimizer.state[p][name] = v.clone()

optimizer.state.clear()

optimizer.state.pop(p, None)

optimizer.state[p] = {}

optimizer.load_state_dict(optimizer.state_dict())

optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

if "optimizer then" in kept: optimizer.load_state_dict(kept["optimizer then"])

if kept.get("moments"): kept["moments"][0].mul_(0.9)

q = optimizer.param_groups[0]["params"].pop(); optimizer.add_param_group({"params": [q], "lr": 0.01})

optimizer.param_groups[0]["params"].remove(p)

optimizer.param_groups[0]["params"].reverse()

optimizer.register_step_pre_hook(lambda *args: nn.utils.clip_grad_value_(model.parameters(), 0.05) and None)

optimizer.register_step_post_hook(lambda *args: None)
""")

GENERATOR = _each("""
torch.manual_seed(k)

if "generator" in kept: torch.set_rng_state(kept["generator"])

torch.randn(k)

torch.poisson(torch.ones(3))

iter(DataLoader(TensorDataset(torch.arange(4)), shuffle=True))

torch.default_generator.manual_seed(k)
""")

OPERATIONS = (*STEPS, *READS, *KEPT, *GRADIENTS, *PARAMETERS, *OPTIMIZER, *GENERATOR)
