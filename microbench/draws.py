"""What it costs a job alone that its random draws go on from the client's generator: steps a second over the plain
loop's.

The same step, with dropout, in turns: plainly; as a job with a generator of its own (rng="own"); and as one
that draws from the client's, whose generator is brought behind each step by skipping the words it takes, by waiting
for the step's answer, and by whichever of the two submit() would choose. Also seconds a word of the generator:
skipped, and drawn by dropout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client
from gpumux.capture.generator import ClientGenerator, client_generator, skip
from microbench import common
from microbench.daemon import running_daemon

Step = Callable[[Tensor, Tensor], Any]
WAYS = ("own", "skipped", "waited for", "as chosen")
TARGET = 0.95  # of the rate of a job with a generator of its own


def perceptron() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """0.03 M parameters, 2 x 32 x 128 elements dropped out: a step of less than a millisecond."""
    body = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 10),
    )
    return body, (torch.rand(32, 64), torch.arange(32) % 10)


def transformer() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """25 M parameters in 8 layers of width 512 over 64 positions, as torch builds them, dropout 0.1."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
            self.head = nn.Linear(512, 10)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.body(x).mean(1))
            return made

    return Classifier(), (torch.rand(4, 64, 512), torch.arange(4) % 10)


MODELS = {"perceptron": perceptron, "transformer": transformer}


def trainer(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]],
) -> tuple[Step, dict[str, Any], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, {"model": model, "optimizer": optimizer}, batch


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each way")
    arguments.add_argument("--seconds", type=float, default=1.5, help="of one turn, about")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    print(common.describe(facts))
    words = seconds_a_word(args.repeats)
    print(
        f"a word: {1e9 * words['skipped'].median:.2f} ns skipped, {1e9 * words['drawn'].median:.2f} ns drawn by dropout"
    )
    rows, result = [], {}
    with running_daemon(threads=1) as daemon:
        for name in args.models:
            found = measure(MODELS[name], daemon.endpoint, args.repeats, args.seconds)
            result[name] = found
            over = found["over_plain"]
            ranges = [f"{over[way].median:.2f} ({over[way].low:.2f}-{over[way].high:.2f})" for way in WAYS]
            plain_ms = f"{1e3 * found['plain_s'].median:.2f}"
            rows.append([name, plain_ms, str(found["words"]), found["chosen"], *ranges])
            print(common.table(["model", "plain ms", "words a step", "chosen", *WAYS], rows[-1:]))
    print(common.table(["model", "plain ms", "words a step", "chosen", *WAYS], rows))
    targets = {
        f"{name}, as chosen over a generator of its own": {
            "value": found["over_own"].median, "target": TARGET, "met": found["over_own"].median >= TARGET
        }
        for name, found in result.items()
    }  # fmt: skip
    for name, target in targets.items():
        print(f"{name}: {target['value']:.2f}, at least {target['target']}: {'met' if target['met'] else 'MISSED'}")
    common.report("draws", args.out, {"machine": facts, "seconds_a_word": words, "models": result, "targets": targets})
    return 0


def seconds_a_word(repeats: int) -> dict[str, common.Figure]:
    count = 1 << 20
    mask = torch.empty(count)
    skipped, drawn = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        skip(2 * count)
        between = time.perf_counter()
        mask.bernoulli_(0.9)
        ended = time.perf_counter()
        skipped.append((between - began) / (2 * count))
        drawn.append((ended - between) / (2 * count))
    return {"skipped": common.figure(skipped), "drawn": common.figure(drawn)}


def measure(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]], endpoint: str, repeats: int, seconds: float
) -> dict[str, Any]:
    plain, _, batch = trainer(make)
    own_step, own_state, _ = trainer(make)
    clients_step, clients_state, _ = trainer(make)
    chooses = ClientGenerator()  # as in a process with this job alone

    def forced(way: str) -> Callable[[int | None, float | None], bool]:
        return lambda words, step_s: way == "waited for" if way != "as chosen" else chooses.waits(words, step_s)

    chosen: list[bool] = []
    with (
        client.submit(own_step, example=batch, rng="own", name="own", endpoint=endpoint, **own_state) as own,
        client.submit(
            clients_step, example=batch, rng="client", name="client", endpoint=endpoint, **clients_state
        ) as theirs,
    ):

        def run(way: str, count: int) -> float:
            """Seconds a step."""
            if way not in ("plain", "own"):
                setattr(client_generator, "waits", forced(way))  # noqa: B010 - a method, for the length of the benchmark
            call: Any = plain if way == "plain" else own.step if way == "own" else theirs.step
            began = time.perf_counter()
            for _ in range(count):
                last = call(*batch)
            last.item()
            return (time.perf_counter() - began) / count

        for way in ("plain", *WAYS):
            run(way, 12)  # measured, cut and captured by then
        program = next(p for p in theirs._remote.programs.values() if p.device_s is not None)
        function: Any = theirs._functions[0][0]
        words = function._cases[0].phases[-1].programs
        drawn = next(iter(words.values())).lowered.words
        chooses._s_per_word = client_generator._s_per_word
        chosen.append(chooses.waits(drawn, program.device_s))
        count = max(2, round(seconds / max(run("plain", 3), 1e-6)))
        samples: dict[str, list[float]] = {way: [] for way in ("plain", *WAYS)}
        for repeat in range(repeats):
            order = ("plain", *WAYS)
            for way in order[repeat % 5 :] + order[: repeat % 5]:
                samples[way].append(run(way, count))
    del client_generator.waits
    return {
        "words": drawn,
        "chosen": "wait" if chosen[0] else "skip",
        "over_own": common.figure([a / b for a, b in zip(samples["own"], samples["as chosen"], strict=True)]),
        "plain_s": common.figure(samples["plain"]),
        "over_plain": {
            way: common.figure([a / b for a, b in zip(samples["plain"], samples[way], strict=True)]) for way in WAYS
        },
    }


if __name__ == "__main__":
    sys.exit(main())
