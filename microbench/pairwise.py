"""How much of its throughput alone a high kernel keeps next to a low one, by how long and how memory-bound both are
(DeepPool, figure 12).

Both kernels run over and over, in streams of their priority behind short windows. A kernel fills the GPU with `--waves`
waves of equal blocks, so its blocks last a wave: nothing else can start in their place until they end, which is what a
short high kernel next to a long low one suffers from. Its intensity is the part of the memory bandwidth it uses alone.
With `--half` a kernel is one wave that leaves half of the room on each multiprocessor free: then the other runs beside
it, and intensity is what matters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumux import config
from gpumux.cli.arguments import whole
from gpumux.device.sim.cost import OTHER_ISSUE, PRODUCT_ISSUE, Kernel
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.errors import ConfigError
from gpumux.simulate.run import simulate
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import charts, common

DURATIONS_S = (10e-6, 50e-6, 200e-6, 1e-3, 5e-3)
INTENSITIES = {"compute": 0.1, "memory": 0.9}  # parts of the bandwidth
WAVES = 8
HALF = 0  # instead of a number of waves
STEP_S = 4e-3  # a step is as many kernels as fill this, at least one
WARMUP, STEPS = 3, 12  # high steps of a pair
CPU_S = 2.0  # of each pair
SHAPE = 0.9  # the paper's: pairs are above it, except short high kernels next to long low ones


@dataclass(frozen=True)
class Kind:
    """One synthetic kernel."""

    seconds: float
    intensity: str

    @property
    def label(self) -> str:
        short = f"{self.seconds * 1e6:.0f} us" if self.seconds < 1e-3 else f"{self.seconds * 1e3:.0f} ms"
        return f"{short} {self.intensity}"

    def kernel(self, spec: GpuSpec, waves: int) -> Kernel:
        """waves: HALF for one wave that fills half of each multiprocessor."""
        nbytes = int(self.seconds * INTENSITIES[self.intensity] * spec.bandwidth)
        issue = PRODUCT_ISSUE if self.intensity == "compute" else OTHER_ISSUE
        if waves == HALF:
            return Kernel(self.label, spec.sms, self.seconds, 2, nbytes, issue=issue)
        return Kernel(self.label, waves * spec.sms, self.seconds / waves, 1, nbytes, issue=issue)

    def workload(self, spec: GpuSpec, waves: int, priority: Priority) -> Workload:
        count = max(1, round(STEP_S / self.seconds))
        return Workload(priority.name.lower(), priority, (self.kernel(spec, waves),) * count)


KINDS = tuple(Kind(seconds, intensity) for intensity in INTENSITIES for seconds in DURATIONS_S)


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--device", choices=("sim", "cpu", "cuda"), default="sim", help="default: sim")
    arguments.add_argument(
        "--gpu-model",
        choices=config.SIMULATED_GPUS,
        help="what is simulated (default: a100; beside a GPU the one most like it)",
    )
    arguments.add_argument("--policy", default="paced", help="default: paced, as in the paper")
    arguments.add_argument("--waves", type=whole, default=WAVES, help="waves of blocks a kernel has")
    arguments.add_argument(
        "--half", dest="waves", action="store_const", const=HALF, help="sim: kernels that leave half of the room free"
    )
    arguments.add_argument("--steps", type=whole, default=STEPS, help="sim: high steps of a pair")
    arguments.add_argument("--seconds", type=float, default=CPU_S, help="cpu: of a pair, alone and together")
    arguments.add_argument("--png", type=common.new_file, metavar="FILE.png", help="draw the heat map")
    args = arguments.parse_args(argv)
    if args.device != "sim" and args.waves == HALF:
        arguments.error("--half chooses simulated kernels. Remedy: leave it out, or --device sim")
    compared: dict[str, Any] = {}
    try:
        if args.device == "cuda":
            kinds, values, compared = on_cuda(args)
        elif args.device == "cpu":
            from microbench import pairwise_cpu  # torch, and a daemon

            kinds, values = pairwise_cpu.KINDS, pairwise_cpu.measure(args.policy, args.seconds)
        else:
            kinds, values = KINDS, simulated(preset(args.gpu_model or "a100"), args.policy, args.waves, args.steps)
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    labels = [kind.label for kind in kinds]
    if compared:
        from microbench import predicted

        print(predicted.show_grid(compared))
    print(
        common.table(
            ["high, next to low:", *labels],
            [[h, *(f"{v:.2f}" for v in line)] for h, line in zip(labels, values, strict=True)],
        )
    )
    exceptions = below(kinds, values)
    print(
        f"below {SHAPE}: {len(exceptions)} of {len(kinds) ** 2} pairs, {sum(e['high_is_shorter'] for e in exceptions)}"
        " of them short next to long"
    )
    result = {
        "device": args.device,
        "policy": args.policy,
        "waves": args.waves,
        "half": args.waves == HALF,
        "kernels": [vars(k) for k in kinds],
    }
    if compared:
        result |= {"compared": compared}
    common.report("pairwise", args.out, {**result, "throughput": values, "below": exceptions})
    if args.png:
        draw(args.png, labels, values, f"{args.policy} on {args.device}")
    return 0


def draw(path: Path, labels: Sequence[str], values: Sequence[Sequence[float]], how: str) -> None:
    """A cell for each pair: how much of its throughput alone the high kernel keeps. `how`: policy and device."""
    title = f"high kernel's throughput over alone, {how}"
    names = ("high kernel", "low kernel")
    charts.heat_map(path, title, labels, labels, values, names, "high throughput over alone (times)")


def on_cuda(args: argparse.Namespace) -> tuple[Sequence[Kind], list[list[float]], dict[str, Any]]:
    """The pairs on the GPU, and how far the simulator is off. Raises ConfigError where there is no GPU."""
    from microbench import pairwise_cuda, predicted
    from microbench.cuda import probe
    from microbench.ways import Setting

    model = args.gpu_model or predicted.model_of(probe.card().card)
    setting = Setting("cuda", "full", pairwise_cuda.SECONDS, pairwise_cuda.SETTLE_S)
    values = pairwise_cuda.measure(setting, args.policy, KINDS)
    says = simulated(preset(model), args.policy, args.waves, args.steps)
    return KINDS, values, predicted.grid([kind.label for kind in KINDS], values, says)


def simulated(spec: GpuSpec, policy: str, waves: int, steps: int) -> list[list[float]]:
    """[high][low]: the high job's throughput over alone."""
    return [[pair(spec, policy, waves, steps, high, low) for low in KINDS] for high in KINDS]


def pair(spec: GpuSpec, policy: str, waves: int, steps: int, high: Kind, low: Kind) -> float:
    jobs = [high.workload(spec, waves, Priority.HIGH), low.workload(spec, waves, Priority.LOW)]
    result = simulate(jobs, spec, policy, steps=steps, warmup_steps=WARMUP)
    return result.job("high").relative_throughput


def below(kinds: Sequence[Kind], values: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The pairs in which the high kernel keeps less than the paper's figure shows for most."""
    return [
        {"high": high.label, "low": low.label, "value": value, "high_is_shorter": high.seconds < low.seconds}
        for high, line in zip(kinds, values, strict=True)
        for low, value in zip(kinds, line, strict=True)
        if value < SHAPE
    ]


if __name__ == "__main__":
    sys.exit(main())
