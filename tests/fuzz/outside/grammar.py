"""Scripts made from seeds: a model, tensors and numbers beside it, functions that use them, lines between their calls.

A script is text. `Place`s say where a tensor is held (a variable, an attribute, an entry), `Piece`s what the step does
with it, the lists of lines what the script does between two steps. In a line `$T` is a place, `$A` another one, `$k` a
small number. Lines that raise in the plain loop are dropped (compare.py).

Names that lines may use: `run(name, *batch)` (a function of the script, in the daemon or not), `batch(k)`,
`note(value)` (what is noted is compared), `again(kind)` (submits again), `kill()` (the executors), `torch`, `nn`, `F`,
`np`, `copy`, `io`, `SimpleNamespace`, `dataclass`.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST = 14


@dataclass(frozen=True)
class Piece:
    """A tensor (or number) beside the model, and what a step does with it: before its forward pass, in the loss, and
    after the update."""

    value: str
    before: str = ""
    loss: str = ""
    after: str = ""
    names: str = ""  # variables that the step binds anew, beside $T if it lies in one
    more: str = ""  # further lines before the step is defined
    fixed: bool = False  # never in a tuple
    between: tuple[str, ...] = ()


def _lines(text: str) -> tuple[str, ...]:
    """Parted by empty lines."""
    return tuple(textwrap.dedent(part).strip("\n") for part in text.strip("\n").split("\n\n"))


PIECES: dict[str, Piece] = {
    "weights": Piece("torch.rand(3) + 0.5", loss="loss = loss + F.cross_entropy(logits, y, weight=$T)"),
    "bias": Piece("torch.randn(6)", before="x = x + $T"),
    "mask": Piece("torch.rand(6) > 0.3", before="x = x * $T"),
    "blank": Piece("torch.rand(4, 3) > 0.5", loss="loss = loss + logits.masked_fill($T[: len(x)], 0.0).pow(2).mean()"),
    "scale": Piece("torch.tensor(0.5)", loss="loss = loss * $T"),
    "running": Piece("torch.zeros(3)", after="$T = 0.9 * $T + 0.1 * logits.detach().mean(0)", fixed=True),
    "running read": Piece(
        "torch.zeros(3)", loss="loss = loss + (logits - $T).pow(2).mean()",
        after="$T = 0.9 * $T + 0.1 * logits.detach().mean(0)", fixed=True,
    ),
    "running loss": Piece("torch.zeros(())", after="$T.mul_(0.9).add_(loss.detach(), alpha=0.1)"),
    "running data": Piece("torch.zeros(3)", after="$T.data = 0.9 * $T.data + 0.1 * logits.data.mean(0)"),
    "centered": Piece(
        "torch.zeros(6)", before="$T.lerp_(x.mean(0), 0.1)\nx = x - $T",
    ),
    "augmented": Piece("torch.zeros(3)", after="$T += logits.detach().sum(0)", fixed=True),
    "confusion": Piece(
        "torch.zeros(3, 3, dtype=torch.long)",
        after="$T.index_put_((y, logits.argmax(1)), torch.ones_like(y), accumulate=True)",
    ),
    "bank": Piece(
        "torch.zeros(8, 6)", loss="loss = loss + 0.01 * (x @ $T.t()).logsumexp(1).mean()",
        after="$T[at : at + len(x)] = x\nat = (at + 4) % 8", names="at", more="at = 0",
    ),
    "indexed bank": Piece(
        "torch.zeros(5, 3)", loss="loss = loss + (logits - $T[y]).pow(2).mean()",
        after="$T[y] = 0.5 * $T[y] + 0.5 * logits.detach()",
    ),
    "copied bank": Piece("torch.zeros(4, 3)", after="$T[: len(x)].copy_(logits.detach())"),
    "swapped": Piece(
        "torch.zeros(3)", more="spare = torch.ones(3)", names="spare", loss="loss = loss + (logits * $T).mean()",
        after="$T, spare = spare, $T", fixed=True,
    ),
    "left": Piece("torch.zeros(4, 3)", after="$T = logits.detach()", fixed=True),
    "left zero": Piece("None", after="$T = loss.detach()", fixed=True),
    "cached": Piece(
        "None", before="if $T is None:\n    $T = torch.ones(6).cumsum(0) / 6\nx = x * $T", fixed=True,
    ),
    "trained": Piece(
        "torch.ones(3, requires_grad=True)", loss="loss = loss + (logits * $T).pow(2).mean()",
        after="with torch.no_grad():\n    $T -= 0.1 * $T.grad\n    $T.grad = None",
    ),
    "number": Piece("0.5", loss="loss = loss * $T", between=("$T = $T * 0.9", "$T = 0.1 * $k", "$T = 0.0")),
    "counter": Piece(
        "0", before="$T += 1", loss="if $T % 3 == 0:\n    loss = loss * 0.5", fixed=True,
        between=("note($T)", "$T = $k", "$T += 1"),
    ),
    "flag": Piece(
        "False", loss="if $T:\n    loss = loss * 2", after="$T = not $T", fixed=True,
        between=("note($T)", "$T = not $T", "$T = True"),
    ),
    "warmup": Piece(
        "0", loss="loss = loss * min(1.0, ($T + 1) / 4)", after="$T += 1", fixed=True,
        between=("note($T)", "$T = 0"),
    ),
    "counted": Piece(
        "torch.tensor(0)", after="$T += 1", loss="loss = loss / (1 + $T)",
    ),
    "decided": Piece(
        "torch.tensor(0)", before="first = int($T) == 0\n$T.add_(1)", loss="if first:\n    loss = loss * 3",
    ),
    "queue": Piece(
        "[torch.zeros(3), torch.ones(3)]", loss="loss = loss + (logits * $T[0]).mean()",
        after="$T[0] = $T[1]\n$T[1] = logits.detach().mean(0)", fixed=True,
        between=("$T[0].zero_()", "$T.reverse()", "note($T[0])", "$T[1] = torch.ones(3)", "$T = [torch.ones(3)] * 2"),
    ),
    "hidden": Piece(
        "(torch.zeros(3), torch.ones(3))", loss="loss = loss + (logits * $T[0] - $T[1]).pow(2).mean()",
        after="$T = (0.5 * $T[0] + logits.detach().mean(0), $T[0] + 0.5 * $T[1])", fixed=True,
        between=(
            "note($T)", "$T = $T[::-1]", "$T[1].zero_()", "$T = (torch.ones(3), $T[1])", "$T = (torch.ones(3),) * 2",
            "$T = (torch.ones(3), torch.zeros(3))", "kept = $T", "kept = $T[1]; note(kept)", "note(kept)",
            "$T[0].data = torch.ones(3)", "$T = tuple(torch.ones(2, 3).unbind())", "$T = [*$T]",
        ),
    ),
    "half hidden": Piece(
        "((torch.zeros(3), 0.5), torch.ones(3))", loss="loss = loss + (logits * $T[0][0] - $T[1]).mean() * $T[0][1]",
        after="$T = ((logits.detach().mean(0), $T[0][1]), $T[1])", fixed=True,
        between=("note($T)", "$T = (($T[1], 0.25), $T[0][0])", "$T[1].add_(1)", "$T = ((torch.ones(3), 2.0), $T[1])"),
    ),
    "made once": Piece(
        "None", before="if not made:\n    $T = torch.ones(6).cumsum(0) / 6\n    made = True\nx = x * $T",
        more="made = False", names="made", fixed=True,
        between=("note($T)", "made = False", "$T.mul_(0.5)", "$T = torch.ones(6)", "$T = None; made = False"),
    ),
    "cached parts": Piece(
        "None", before="if $T is None:\n    $T = torch.ones(6).cumsum(0) / 6\n    part = $T[:3]\nx = x * $T",
        loss="loss = loss + (logits * part).mean()", more="part = None", names="part", fixed=True,
        between=("note($T)", "$T.mul_(0.5)", "part.zero_()", "$T = None"),
    ),
    "left constant": Piece(
        "torch.zeros(2)", loss="loss = loss + $T.sum()", after="$T = torch.ones(4).cumsum(0)", fixed=True,
        between=("note($T)", "$T.mul_(0.5)", "$T = torch.ones(3)", "kept = $T", "note(kept)"),
    ),
    "average": Piece(
        "{k: v.detach().clone() for k, v in model.state_dict().items()}",
        after="for k, v in model.state_dict().items():\n    $T[k] = $T[k] * 0.9 + v.detach() * 0.1",
        between=(
            "note($T)", "model.load_state_dict($T)", "$T = copy.deepcopy($T)", "$T['0.bias'].zero_()",
            "$T['0.bias'] = torch.ones(8)", "$T.update({k: v.clone() for k, v in $T.items()})",
            "for k, v in model.state_dict().items(): $T[k].lerp_(v, 0.5)",
            "for k, v in model.named_parameters(): $T[k] = v.detach().clone()",
            "keep = {k: v.clone() for k, v in model.state_dict().items()}; model.load_state_dict($T); "
            "note(run('evaluate', batch($k)[0])); model.load_state_dict(keep)",
        ),
    ),
    "average in place": Piece(
        "{k: v.detach().clone() for k, v in model.named_parameters()}",
        after="with torch.no_grad():\n    for k, v in model.named_parameters():\n"
        "        $T[k].mul_(0.9).add_(v, alpha=0.1)",
        loss="loss = loss + $T['0.bias'].pow(2).sum()",
        between=(
            "note($T)", "$T['0.bias'].zero_()", "$T['0.bias'] = torch.ones(8)",
            "for k, v in model.named_parameters(): v.data.copy_($T[k])",
            "for k, v in model.named_parameters(): v.data, $T[k] = $T[k], v.data",
            "saved = {k: v.data for k, v in model.named_parameters()}\n"
            "for k, v in model.named_parameters(): v.data = $T[k]\n"
            "note(run('evaluate', batch($k)[0]))\n"
            "for k, v in model.named_parameters(): v.data = saved[k]",
        ),
    ),
    "average data": Piece(
        "{k: v.detach().clone() for k, v in model.named_parameters()}",
        after="for k, v in model.named_parameters():\n    $T[k].data = 0.9 * $T[k].data + 0.1 * v.data",
        between=("note($T)", "$T['0.bias'].data = torch.zeros(8)", "$T['0.bias'].data.zero_()"),
    ),
    "teacher": Piece(
        "copy.deepcopy(model)",
        loss="with torch.no_grad():\n    soft = $T(x).softmax(1)\n"
        "loss = loss + F.kl_div(logits.log_softmax(1), soft, reduction='batchmean')",
        between=(
            "$T.load_state_dict(model.state_dict())", "$T = copy.deepcopy(model)", "$T.eval()", "$T.train()",
            "with torch.no_grad():\n    for a, b in zip($T.parameters(), model.parameters()): a.lerp_(b, 0.5)",
            "for a, b in zip($T.parameters(), model.parameters()): a.data = b.data.clone()",
            "for a, b in zip($T.parameters(), model.parameters()): a.data.mul_(0.5).add_(b.data, alpha=0.5)",
            "$T.requires_grad_(False)", "$T.requires_grad_(True)", "note($T.state_dict())",
            "note($T(batch($k)[0]))", "$T[0].weight = nn.Parameter(torch.zeros(8, 6))",
            "$T[0] = nn.Linear(6, 8)", "$T.zero_grad()", "$T(batch($k)[0]).sum().backward()",
            "$T.double().float()", "next($T.parameters()).numpy(force=True)[...] *= 0.5",
            "$T[0].bias = model[0].bias", "model.load_state_dict($T.state_dict())",
        ),
    ),
    "momentum teacher": Piece(
        "copy.deepcopy(model).requires_grad_(False)",
        loss="loss = loss + ($T(x) - logits).pow(2).mean()",
        after="with torch.no_grad():\n    for a, b in zip($T.parameters(), model.parameters()):\n"
        "        a.mul_(0.9).add_(b, alpha=0.1)",
        between=(
            "$T.load_state_dict(model.state_dict())", "note($T.state_dict())", "$T = copy.deepcopy(model)",
            "for a, b in zip($T.parameters(), model.parameters()): a.data, b.data = b.data, a.data",
            "note(run('evaluate', batch($k)[0]))",
        ),
    ),
    "momentum teacher data": Piece(
        "copy.deepcopy(model)",
        loss="loss = loss + ($T(x).detach() - logits).pow(2).mean()",
        after="for a, b in zip($T.parameters(), model.parameters()):\n    a.data = 0.9 * a.data + 0.1 * b.data",
        between=("$T.load_state_dict(model.state_dict())", "note($T.state_dict())"),
    ),
    "held weight": Piece("model[0].weight", loss="loss = loss + 0.01 * $T.pow(2).sum()"),
    "held data": Piece("model[0].bias.data", loss="loss = loss + $T.sum() * 0.01"),
    "held buffer": Piece("model[1].running_mean", loss="loss = loss + ($T * $T).sum()"),
    "anchor": Piece(
        "[p.detach().clone() for p in model.parameters()]",
        loss="loss = loss + 0.1 * sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), $T))",
        between=(
            "$T = [p.detach().clone() for p in model.parameters()]", "$T[0].zero_()", "$T[0] = $T[0] + 1",
            "for p, q in zip(model.parameters(), $T): q.copy_(p)",
            "for p, q in zip(model.parameters(), $T): q.data = p.data.clone()",
            "for p, q in zip(model.parameters(), $T): p.data.copy_(q)", "note($T)",
        ),
    ),
}  # fmt: skip

# How a tensor is held: lines before, the expression, and whether it can be bound anew.
PLACES: tuple[tuple[str, str, bool], ...] = (
    ("", "t#", True),
    ("", "t#", True),
    ("", "t#", True),
    ("b# = SimpleNamespace()", "b#.t", True),
    ("class B#:\n    pass\nb# = B#()", "b#.t", True),
    ("class B#:\n    t = None", "B#.t", True),
    ("b# = {}", "b#['t']", True),
    ("b# = {'a': {}}", "b#['a']['t']", True),
    ("b# = [0, 0]", "b#[1]", True),
    ("b# = SimpleNamespace(c=[0])", "b#.c[0]", True),
    ("", "b#[1]", False),
    ("", "model.t#", True),
)

REFUSED = ("swapped", "queue", "average", "average data", "running data", "left", "left zero", "trained")

ALIASES = _lines("""
$A = $T

$A = $T[:2]

$A = $T.view(-1)

$A = $T.detach()

$A = $T.data

$A = $T.data

$A = $T.t()

$A = $T.detach()[:2]

$A = torch.from_numpy($T.numpy())

$A = $T.clone()
""")  # fmt: skip

UPDATES = {
    "plain": "optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
    "kept gradients": "loss.backward()\noptimizer.step()",
    "sam": (
        "optimizer.zero_grad()\nloss.backward()\n"
        "old = [p.data for p in model.parameters()]\n"
        "for p in model.parameters():\n    p.data = p.data + 0.05 * p.grad\n"
        "optimizer.zero_grad()\nF.cross_entropy(model(x), y).backward()\n"
        "for p, q in zip(model.parameters(), old):\n    p.data = q\noptimizer.step()"
    ),
    "scaler": (
        "optimizer.zero_grad()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    ),
    "clipping scaler": (
        "optimizer.zero_grad()\nscaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5)\nscaler.step(optimizer)\nscaler.update()"
    ),
    "data update": (
        "model.zero_grad()\nloss.backward()\nfor p in model.parameters():\n    p.data = p.data - 0.05 * p.grad"
    ),
}  # fmt: skip

OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.SGD(model.parameters(), lr=0.05)",
    "torch.optim.Adam(model.parameters(), lr=0.01)",
    "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
)

FUNCTIONS = _lines("""
def evaluate(x):
    with torch.no_grad():
        return model(x)

def evaluate(x):
    with torch.no_grad():
        return model(x) + $T.float().mean()

def evaluate(x):
    return (x @ model[0].weight.t()).sum() * $T.sum()

def evaluate(x):
    old = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        out = model(x)
    for p, q in zip(model.parameters(), old):
        p.data = q
    return out
""")  # fmt: skip

WRITERS = _lines("""
$T.zero_()

$T.mul_(0.5)

$T.add_($T)

$T = torch.zeros_like($T)

$T = $T * 0.5

$T.data = $T.data * 0.5

$T[0] = 1

$T.copy_($A)

$T.data = $A.data
""")  # fmt: skip

SECOND = _lines("""
out = model2(x)
loss = F.cross_entropy(out, y) + out.mean() * $T.float().mean()

out = model2(x)
with torch.no_grad():
    soft = model(x).softmax(1)
loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), soft, reduction="batchmean")

out = model2(x)
loss = F.cross_entropy(out, y)
$T.mul_(0.9)

out = model2(x)
loss = F.cross_entropy(out, y) + model[0].weight.detach().pow(2).sum()
""")  # fmt: skip

STEPS = _lines("""
run("step", *batch($k))

run("step", *batch($k)); run("step", *batch($k))

run("step", *batch($k)); run("step", *batch($k)); run("step", *batch($k))

note(run("step", *batch($k)))

x, y = batch($k); run("step", x[:2], y[:2])

x, y = batch($k); run("step", x * 1e30, y)

x, y = batch($k); run("step", x * float("inf"), y)

result = run("step", *batch($k))
""")  # fmt: skip

OTHERS = _lines("""
run("evaluate", batch($k)[0])

note(run("evaluate", batch($k)[0]))

model.eval(); note(run("evaluate", batch($k)[0])); model.train()

run("write")

run("write"); note($T)

run("second", *batch($k))

run("second", *batch($k)); run("step", *batch($k))

again("close first")

again("close later")
""")  # fmt: skip

READS = _lines("""
note($T)

note($T + 0)

note($T.sum())

note($T.tolist())

note($T.numpy(force=True).copy())

note(np.asarray($T.detach()).sum())

note($T.requires_grad)

note($T.is_leaf)

note($T.shape)

note($T.grad)

note(torch.is_tensor($T) and $T.data_ptr() == $A.data_ptr())

note($T is $A)

note(copy.deepcopy($T))

note(repr($T))

note(bool(($T == $A).all()))

note(torch.stack([$T, $A]))

note($T.to(torch.float64))

note($T.detach().cpu())

note(float($T.flatten()[0]))

note(model.state_dict())

note([p.grad for p in model.parameters()])

note(optimizer.state_dict()["state"])

file = io.BytesIO(); torch.save($T, file); note(torch.load(io.BytesIO(file.getvalue())))

note(result)

note($T * result)
""")  # fmt: skip

WRITES = _lines("""
$T.mul_(0.9)

$T.zero_()

$T.add_($k)

$T[0] = $k

$T.fill_(0.1 * $k)

$T.data.add_(0.1)

$T.data.zero_()

$T.data = $T.data * 0.5

$T.data = $T.data.clone()

$T.data = torch.ones_like($T)

$T.data = $A.data

$T.detach().mul_(0.5)

$T.view(-1)[0] = 0.5

$T.numpy()[...] *= 0.5

$T.detach().numpy().fill(0.25)

array = $T.detach().numpy()

array[...] = 0.125

array *= 0.5

torch.from_numpy(array).mul_(0.5)

with torch.no_grad(): $T.copy_($A)

$T.copy_($A.detach())

with torch.no_grad(): $T.mul_(0.9)

$T[...] = $A

$T.set_($T.clone())

$T.resize_($T.shape)

$T.t_()

$T.unsqueeze_(0)

$T.squeeze_(0)

nn.init.normal_($T)

$T.random_(0, 2)

$T += 1

$T *= 0.5

torch.mul($T, 0.5, out=$T)

torch._foreach_mul_([$T, $A], 0.5)

$T.data = $T.data[:2]

$T.data = torch.zeros(2, 8)[1, : len($T)]
""")  # fmt: skip

BINDS = _lines("""
$T = $T.clone()

$T = $T * 0.9

$T = torch.zeros_like($T)

$T = torch.rand_like($T)

$T = $T.detach()

$T = $T.data

$T = $A

$T = $A.clone()

$T = $T + 0.1 * $A

$T = $T.double()

$T = $T.float()

$T = $T.to(torch.float32)

$T = $T[:]

$T = $T.view_as($T)

$T = copy.deepcopy($T)

$T = nn.Parameter($T)

$T = None

$T = torch.from_numpy($T.numpy().copy())

$T = torch.from_numpy($T.numpy())

$T = $T + result.detach()

$T = result

$T = torch.zeros(())

held = $T

$T = held

held.mul_(0.5)

held.data = held.data + 1

note(held)

$T, $A = $A, $T

file = io.BytesIO(); torch.save($T, file); $T = torch.load(io.BytesIO(file.getvalue()))

$T = model[0].bias.data

$T = model[0].weight

$T = model[1].running_mean
""")  # fmt: skip

MODELS = _lines("""
model.load_state_dict(copy.deepcopy(model.state_dict()))

kept = copy.deepcopy(model.state_dict())

model.load_state_dict(kept)

model.load_state_dict(model2.state_dict())

model2.load_state_dict(model.state_dict())

with torch.no_grad(): model[0].weight.mul_(0.9)

model[0].bias.data.zero_()

model[0].bias.data = torch.ones(8)

for p in model.parameters(): p.data = p.data.clone()

model[0].bias.data = model[1].bias.data

model[1].running_mean.zero_()

model[1].running_mean = torch.ones(8)

model[0].weight = nn.Parameter(torch.ones(8, 6))

optimizer.zero_grad()

model.zero_grad()

optimizer.param_groups[0]["lr"] *= 0.5

$T.requires_grad_()

$T.requires_grad_(False)

model[0].weight.requires_grad_(False)

model[0].weight.requires_grad_(True)

torch.manual_seed($k)

($T * 2).sum().backward()

$T.grad = None

optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))

note(scaler.get_scale())

note(scaler.state_dict())

scaler.update(128.0 * $k)

scaler.set_growth_interval($k)

scaler.set_backoff_factor(0.25)

optimizer.add_param_group({"params": [$T]})
""")  # fmt: skip

KILLS = _lines("""
kill()

kill(); run("step", *batch($k))

run("step", *batch($k)); kill()
""")  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A script: what it does at first, and its operations between steps. `inside`: in a function, so that its
    variables are a closure's, or a module's globals."""

    setup: str
    lines: tuple[str, ...]
    inside: bool
    names: frozenset[str] = field(default_factory=frozenset)  # all variables, compared in the end

    def text(self) -> str:
        """One that `run` executes."""
        body = [self.setup, "begin()"]
        for i, lines in enumerate(self.lines):
            caught = textwrap.indent(lines, "    ")
            body.append(f"if wanted({i}):\n{caught}")
        names = sorted(self.names)
        given = ", ".join(f"{name!r}: lambda: {name}" for name in names)
        body.append(f"finish({{{given}}})")
        text = "\n".join(body)
        if not self.inside:
            return text + "\n"
        return f"def main():\n{textwrap.indent(text, '    ')}\n\nmain()\n"


def script(seed: int, kills: bool = False) -> Work:
    """The same for the same seed."""
    rng = random.Random(seed)
    inside = rng.random() < 0.5
    scope = "nonlocal" if inside else "global"
    optimizer, update = rng.choice(OPTIMIZERS), rng.choices(list(UPDATES), [6, 1, 1, 1, 1, 1])[0]
    setup = [
        "model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))",
        "result = held = array = None",
        f"optimizer = {optimizer}",
        f"scaler = torch.amp.GradScaler('cpu', init_scale={rng.choice([1.0, 1024.0, 2.0**16])}, growth_interval=2)",
    ]
    names = {"model", "optimizer", "scaler", "result", "held", "array"}
    chosen = [PIECES[name] for name in _names(rng)]
    places, bound, own = [], set(), []
    parts: dict[str, list[str]] = {"before": [], "loss": [], "after": []}
    for i, piece in enumerate(chosen):
        first, place, binds = rng.choice([p for p in PLACES if p[2] or not piece.fixed])
        first, place = first.replace("#", str(i)), place.replace("#", str(i))
        setup += [first] if first else []
        if binds:
            setup.append(f"{place} = {piece.value}")
        else:
            setup.append(f"{place.split('[')[0]} = (None, {piece.value})")
        setup += [piece.more] if piece.more else []
        bound |= {place} if place.isidentifier() else set()
        bound |= set(piece.names.split())
        names.add(place.split("[")[0].split(".")[0])
        names |= set(piece.names.split())
        places.append(place)
        for part, lines in parts.items():
            text = getattr(piece, part).replace("$T", place)
            lines += [text] if text else []
        own += [line.replace("$T", place) for line in piece.between]
    tensors = [p for p, piece in zip(places, chosen, strict=True) if piece.value.startswith(("torch.", "model["))]
    tensors = tensors or [rng.choice(["model[0].weight", "model[1].running_mean"])]
    for i in range(rng.choice([0, 0, 1, 1, 2])):
        alias = f"a{i}"
        setup.append(rng.choice(ALIASES).replace("$A", alias).replace("$T", rng.choice(tensors)))
        names.add(alias)
        if rng.random() < 0.6:
            use = rng.choice(["loss = loss + 0.01 * $T.sum()", "loss = loss + 0.01 * $T.float().pow(2).mean()"])
            parts[rng.choice(["loss", "loss"])].append(use.replace("$T", alias))
        elif rng.random() < 0.4:
            parts["after"].append(rng.choice(WRITERS[:3]).replace("$T", alias))
        tensors.append(alias)
    result = rng.choice(["loss", "loss", "loss, logits", "{'loss': loss}"])
    if rng.random() < 0.2:
        result = f"loss, {rng.choice(tensors)} * 1"
    changed = rng.random() < 0.15
    body = [
        *(["x.mul_(0.5)"] if changed else []), *parts["before"],
        "logits = model(x)", "loss = F.cross_entropy(logits, y)",
        *parts["loss"], UPDATES[update], *parts["after"], f"return {result}",
    ]  # fmt: skip
    setup.append(_function("step(x, y)", body, scope, bound))

    def pick(text: str) -> str:
        return _filled(text, rng, tensors)

    setup.append(pick(rng.choice(FUNCTIONS)))
    writer = pick(rng.choice(WRITERS))
    setup.append(_function("write()", [writer], scope, {t for t in tensors if t.isidentifier()}))
    setup.append("model2 = nn.Linear(6, 3)\noptimizer2 = torch.optim.SGD(model2.parameters(), lr=0.05)")
    names |= {"model2"}
    second = [pick(rng.choice(SECOND)), "optimizer2.zero_grad()\nloss.backward()\noptimizer2.step()\nreturn loss"]
    setup.append(_function("second(x, y)", second, scope, set()))
    setup.append("functions(step=step, evaluate=evaluate, write=write, second=second)")
    setup.append("submitted(model=model, optimizer=optimizer, model2=model2, optimizer2=optimizer2)")
    groups: list[Sequence[str]] = [OTHERS, READS, WRITES, BINDS, MODELS]
    liking = [rng.choice([0.3, 1, 3]) for _ in groups]
    lines = []
    for _ in range(rng.randrange(4, LONGEST)):
        draw = rng.random()
        if draw < 0.4:
            line = rng.choices(STEPS, [4, 3, 3, 4, 1, 1, 0.5, 2])[0]
        elif kills and draw < 0.5:
            line = rng.choice(KILLS)
        elif own and draw < 0.6:
            line = rng.choice(own)
        else:
            line = rng.choice(rng.choices(groups, liking)[0])
        lines.append(_filled(line, rng, tensors))
    lines.append(_filled(STEPS[3], rng, tensors))
    return Work("\n".join(setup), tuple(lines), inside, frozenset(names))


def _names(rng: random.Random) -> list[str]:
    """Seldom those that are refused where they are submitted."""
    names = [name for name in PIECES if name not in REFUSED or rng.random() < 0.1]
    return rng.sample(names, rng.choice([1, 1, 2, 2, 3]))


def _function(head: str, body: Sequence[str], scope: str, bound: set[str]) -> str:
    lines = "\n".join(body)
    declared = [f"{scope} {', '.join(sorted(bound))}"] if bound else []
    return f"def {head}:\n" + textwrap.indent("\n".join([*declared, lines]), "    ")


def _filled(text: str, rng: random.Random, tensors: Sequence[str]) -> str:
    one, other = rng.choice(tensors), rng.choice(tensors)
    while "$k" in text:
        text = text.replace("$k", str(rng.randrange(1, 6)), 1)
    return text.replace("$T", one).replace("$A", other)
