"""The arguments of `gpumux plan` and `gpumux tune`. Imports nothing heavy, so that every --help is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf, isfinite

from gpumux import config

_PLAN = """\
What to know before asking for GPUs. Nothing here needs a daemon or a GPU, but for --device cuda of `plan profile` and
`plan network`.

MODEL is module:factory (a function of yours that returns a torch module, or one and its example arguments) or a
built-in: alexnet, vgg11, vgg16, vgg19_bn, resnet50, wide_resnet101_2, inception_v3, transformer, bert_base, gpt2. Where
only its layers' times are wanted (burst, servers), a file that `gpumux plan profile` wrote will do, too.

examples:
  gpumux plan burst vgg16 --gpus 8 --global-batch 32 --amplification 2     how many GPUs each layer should have
  gpumux plan profile my.models:net --input 3,224,224 -o net.json          time every layer here
  gpumux plan network --ranks 4 -o here.json                               measure what `burst --network` takes
  gpumux plan batch alexnet --memory 12GB                                  mini-batch and convolution algorithms
  gpumux plan memory gpt2 --batch 8                                        ways to train on a doubled batch, by bytes
  gpumux plan gpus --speedup 3 --overhead 0.1                              GPUs for a speed-up
  gpumux plan servers --parameters 180MB --workers 8 --compute 0.5 --bandwidth 1Gb,10Gb

exit codes: 0 done, 1 the model can't be traced, 64 wrong usage, 78 wrong input
"""
_BURST = """\
Finds the number of GPUs for each layer that makes an iteration quickest, while no layer costs more than LIMIT times the
GPU time it takes on one GPU, transfers into it and its gradients' all-reduce included. MODEL: see `gpumux plan --help`;
without a profile its times are modelled for --gpu-model. docs/planning.md explains the model and the search.

examples:
  gpumux plan burst vgg16 --gpus 8 --global-batch 32 --amplification 2 --plot timeline.png
  gpumux plan burst vgg16 --gpus 8 --global-batch 32 --save plan.json
                                          then see what sharing gives: gpumux simulate --plan plan.json --low vgg16-b4
  gpumux plan burst net.json --gpus 64 --global-batch 256 --network 200g --algorithm deeppool --json
  gpumux plan burst net.json --gpus 4 --global-batch 32 --network here.json     measured (gpumux plan network)
  gpumux plan burst inception_v3 --gpus 8 --global-batch 32 --figures pictures/
  gpumux plan burst my.models:net --input 3,224,224 --gpus 2 --global-batch 16 --profile b8.json --profile b16.json
                                          with what the steps of a job that trains it took (gpumux jobs profile)
"""
_PROFILE = """\
Runs each layer of a torch model alone, forward and backward, and writes what it takes. Ctrl-C writes nothing.

examples:
  gpumux plan profile vgg16 --device cuda -o vgg16.json
  gpumux plan profile my.models:net --input 3,224,224 --batches 1,2,4,8 --threads 1 -o net.json
  gpumux plan profile vgg16 --gpu-model h200 -o vgg16.json            modelled for a GPU that is not there
  gpumux plan profile vgg16 --profile b8.json -o vgg16.json           from a job's steps (gpumux jobs profile)
"""
_NETWORK = """\
Measures the network that a plan assumes, with torch.distributed: gloo for --device cpu, NCCL for --device cuda (written
and never run). Ranks send to the next and receive from the one before at the same time, and sum with all-reduce, among
2, 4 ... and all ranks, at sizes from 8 bytes up. `gpumux plan burst --network FILE` then takes transfers and sums as
measured; it plans for as many GPUs as there were ranks, or fewer.

Without --rank all ranks are processes of this machine, on the loopback device. Across machines start the command once
for each rank, as with torchrun, all with the same options; rank 0 keeps the store at HOST:PORT, prints and writes.
GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the network interface where a machine has several. Connections are neither
encrypted nor authenticated: use a network that you trust. More ranks than cores wait for a core as well as for the
network, and the output says so. Let nothing else run meanwhile.

examples:
  gpumux plan network --ranks 4 -o here.json
  gpumux plan network --ranks 2 --largest 64MiB --rounds 20 -o here.json --json
  gpumux plan network --rank 0 --ranks 2 --store 10.0.0.1:29500 -o two.json      on 10.0.0.1
  gpumux plan network --rank 1 --ranks 2 --store 10.0.0.1:29500                  on the other machine

exit codes: 0 done, 1 a rank did not come within --limit or was lost, 64 wrong usage, 78 wrong input, 130 interrupted
"""
_BATCH = """\
For each mini-batch, chooses every convolution's algorithm (implicit GEMM, FFT, Winograd) such that all are quickest
together within the memory that is left, and suggests the mini-batch with least time a sample. Times are modelled, or
with --times those that `gpumux plan profile --algorithms` measured, of the algorithms that this device has. Needs scipy
(pip install scipy).

examples:
  gpumux plan batch alexnet --memory 12GB
  gpumux plan batch my.models:net --input 3,224,224 --batches 32,64,128 --memory 2GB --gpu-model a100
  gpumux plan profile my.models:net --input 3,224,224 --algorithms --batches 16,32 -o net.json      measured ...
  gpumux plan batch my.models:net --input 3,224,224 --times net.json --memory 2GB                   ... and taken
"""
_MEMORY = """\
Captures a training step of the model over fake tensors in five ways: the batch as it is; a doubled batch; that batch in
two microbatches; that batch with torch.utils.checkpoint around each of the model's blocks; and two waves of the batch
(a replica of the model and of the optimizer each, whose temporaries take turns). For each it says what state, batch and
temporaries take, and the time that a roofline predicts, then which way takes the fewest bytes within a factor of the
doubled batch's time. The loss is the model's own, if it returns one, else a cross entropy. docs/planning.md says how
the bytes are found. It takes as long as four captures: seconds of a small model, a minute of a large one.

examples:
  gpumux plan memory gpt2 --batch 8
  gpumux plan memory resnet50 --batch 64 --optimizer momentum --plot step.png
  gpumux plan memory my.models:net --input 3,224,224 --batch 32 --within 1.4 --json

exit codes: 0 done, 1 the step can't be captured, 64 wrong usage, 78 wrong input
"""
_GPUS = """\
Lemma 3.1 of "Distributed training guidelines": efficiency is (1 + R) / (1 + G R) on G GPUs. R is the time of your loop
that is not hidden behind computation, over computation, on one GPU: give it, or a trace that torch.profiler exported
from the loop.

examples:
  gpumux plan gpus --speedup 3 --overhead 0.1          how many GPUs
  gpumux plan gpus --gpus 4 --efficiency 0.8           what overhead is tolerable
  gpumux plan gpus --speedup 3 --efficiency 0.8        how many GPUs, and what overhead is tolerable
  gpumux plan gpus --gpus 8 --trace loop.json          what they would give
"""
_SERVERS = """\
Lemma 3.2 of "Distributed training guidelines": how many parameter servers hide their traffic behind computation, and
whether all-reduce, a sharded optimizer or sharded parameters would without any. Sizes end in B, KB, MB or GB (powers of
ten) or KiB, MiB, GiB; bandwidths in Kb, Mb, Gb (bits a second) or KB, MB, GB (bytes a second).

examples:
  gpumux plan servers --parameters 180MB --workers 8 --compute 0.5 --bandwidth 1Gb,10Gb
  gpumux plan servers --model vgg16 --workers 16 --compute 0.2 --bandwidth 25Gb
"""

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9, "B": 1.0}
_RATES = {"Kb": 1e3 / 8, "Mb": 1e6 / 8, "Gb": 1e9 / 8, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def _with_unit(text: str, units: dict[str, float], what: str) -> float:
    for unit, factor in units.items():
        if text.endswith(unit):
            text, scale = text.removesuffix(unit), factor
            break
    else:
        above_zero(text, what)
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: give {', '.join(text + unit for unit in units)}")
    return above_zero(text, what) * scale


def above_zero(text: str, what: str = "number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} above 0")
    return value


def size(text: str) -> float:
    """Bytes of "12GB", "180MB", "1024B"."""
    return _with_unit(text, _SIZES, "size")


def rate(text: str) -> float:
    """Bytes a second of "10Gb" (bits), "300GB" (bytes)."""
    return _with_unit(text, _RATES, "bandwidth")


def whole(text: str) -> int:
    """An integer from 1 up."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number: give a whole number from 1 up")
    return value


def limit(text: str) -> float:
    """A factor from 1 up, or none."""
    if text == "none":
        return inf
    value = above_zero(text, "factor")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one GPU alone has 1, so give 1 or more, or none")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def ratio(text: str) -> float:
    """A number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return value


def several(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def parse(text: str) -> tuple[float, ...]:
        return tuple(kind(each) for each in text.split(","))

    return parse


def wholes(text: str) -> tuple[int, ...]:
    """Integers from 1 up, separated by commas; each once, rising."""
    return tuple(sorted({whole(each) for each in text.split(",")}))


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and options of `gpumux plan`."""
    parser.epilog = _PLAN
    verbs = parser.add_subparsers(dest="verb", metavar="WHAT", required=True)

    def verb(name: str, meaning: str, epilog: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = verbs.add_parser(
            name,
            help=meaning,
            description=meaning[0].upper() + meaning[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument("--json", action="store_true", help="print JSON, for scripts")
        return made

    _burst(verb("burst", "how many GPUs each layer should have", _BURST))
    _profile(verb("profile", "time a model's layers", _PROFILE))
    _network(verb("network", "measure bandwidth and latency among ranks", _NETWORK))
    _batch(verb("batch", "mini-batch and convolution algorithms for a CNN", _BATCH))
    _memory(verb("memory", "bytes and time of ways to train on a doubled batch", _MEMORY))
    _gpus(verb("gpus", "GPUs for a speed-up, and the overhead they tolerate", _GPUS))
    _servers(verb("servers", "parameter servers, and what does without them", _SERVERS))


FILE = "a profile's file, "
TORCH = "module:factory or a built-in (gpumux plan --help)"


def _model(parser: argparse.ArgumentParser, *, file: bool = False) -> None:
    """Add MODEL and its options. file: a profile's file is accepted, too."""
    parser.add_argument("model", metavar="MODEL", help=FILE + TORCH if file else TORCH)
    parser.add_argument(
        "--input", metavar="N,N,...", type=wholes_in_order, help="shape of one sample of the model's input"
    )
    parser.add_argument(
        "--whole",
        metavar="CLASS",
        action="append",
        default=[],
        help="modules of this class are one layer; may be given again",
    )
    parser.add_argument(
        "--gpu-model", metavar="|".join(config.GPU_MODELS), choices=config.GPU_MODELS, help="whose times"
    )


def wholes_in_order(text: str) -> tuple[int, ...]:
    return tuple(whole(each) for each in text.split(","))


def _steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="FILE",
        action="append",
        default=[],
        help="take MODEL's times from a step that `gpumux jobs profile` recorded; give one for each batch size",
    )


def _burst(parser: argparse.ArgumentParser) -> None:
    _model(parser, file=True)
    _steps(parser)
    flag = parser.add_argument
    flag("--gpus", metavar="N", type=whole, required=True, help="GPUs of the cluster")
    flag("--global-batch", metavar="N", type=whole, required=True, help="samples of one iteration, all GPUs together")
    flag("--amplification", metavar="LIMIT", type=limit, default=2.0, help="GPU time over one GPU's (default 2; none)")
    flag("--counts", metavar="N,N,...", type=wholes, help="GPU counts a layer may have (default: powers of two)")
    flag("--algorithm", choices=("optimal", "deeppool"), default="optimal", help="default optimal")
    flag("--network", metavar="NAME", help="nvswitch (default), 200g, 25g, or a file of `gpumux plan network`")
    flag("--bandwidth", metavar="RATE", type=rate, help="of one GPU, instead of --network's: 25GB, 200Gb")
    flag("--latency", metavar="SECONDS", type=ratio, help="instead of --network's")
    flag(
        "--overlap",
        metavar="SHARE",
        type=share,
        default=0.0,
        help="of backward that hides sync (default 0, the paper's)",
    )
    flag(
        "--critical-batch",
        metavar="N",
        type=above_zero,
        help="for --curve and --figures: the batch from which a larger one saves few iterations (default 1024)",
    )
    flag("--save", metavar="FILE.json", help="write the plan to a file, for `gpumux simulate --plan`")
    flag("--plot", metavar="FILE.png", help="draw the plan's timeline (pip install matplotlib)")
    flag("--figures", metavar="DIR", help="draw what sizes, networks, layers and limits make of it")
    flag(
        "--curve",
        action="store_true",
        help="also the best plan for each of several limits, and the ways to scale on each number of GPUs",
    )


def _profile(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    _steps(parser)
    flag = parser.add_argument
    flag("-o", "--out", metavar="FILE", required=True, help="where to write it")
    flag("--device", choices=("cpu", "cuda"), help="where to run the layers (default cpu)")
    flag("--batches", metavar="N,N,...", type=wholes, help="batch sizes (default 1,2,4,8,16,32)")
    flag("--repeats", metavar="N", type=whole, help="runs of each layer, after one to warm up (default 5)")
    flag("--threads", metavar="N", type=whole, help="intra-op threads on the CPU")
    flag(
        "--algorithms",
        action="store_const",
        const=True,
        help="also time each 2d convolution by each algorithm of the device (CPU: oneDNN and torch's own, channels last"
        " or not; CUDA: cuDNN's, never run so far), for `plan batch --times`",
    )


def _network(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--ranks", metavar="N", type=_two, required=True, help="processes that exchange")
    flag("-o", "--out", metavar="FILE", help="where to write it (not on ranks 1 and up)")
    flag("--rank", metavar="I", type=natural, help="be this one of ranks started by hand, from 0 (with --store)")
    flag("--store", metavar="HOST:PORT", help="where rank 0 waits for the others (with --rank)")
    flag("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL (default cpu)")
    flag("--largest", metavar="SIZE", type=size, default=size("4MiB"), help="the largest message (default 4MiB)")
    flag("--rounds", metavar="N", type=whole, default=9, help="whose medians are taken (default 9)")
    flag(
        "--limit", metavar="SECONDS", type=above_zero, default=60.0, help="to wait for ranks, and for any one operation"
    )


def _batch(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    flag = parser.add_argument
    flag("--memory", metavar="SIZE", type=size, help="of the device (default: --gpu-model's; needed with --times)")
    flag(
        "--batches",
        metavar="N,N,...",
        type=wholes,
        help="mini-batches to try (default 16,32,64,128,256,512, or the file's)",
    )
    flag("--algorithms", metavar="NAMES", help="default gemm,fft,winograd")
    flag("--times", metavar="FILE", help="measured times and algorithms: of `gpumux plan profile --algorithms`")


def _memory(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("model", metavar="MODEL", help=TORCH)
    flag("--input", metavar="N,N,...", type=wholes_in_order, help="shape of one sample of the model's input")
    flag("--batch", metavar="N", type=whole, required=True, help="samples of a step, before it is doubled")
    flag("--optimizer", choices=("sgd", "momentum", "adamw"), default="adamw", help="default adamw")
    flag("--within", metavar="FACTOR", type=limit, default=1.1, help="of the doubled batch's time (default 1.1; none)")
    flag("--gpu-model", metavar="|".join(config.GPU_MODELS), choices=config.GPU_MODELS, help="whose times")
    flag("--plot", metavar="FILE.png", help="draw live bytes over the step in each way (pip install matplotlib)")


def _gpus(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--speedup", metavar="X", type=above_zero, help="wanted over one GPU")
    flag("--gpus", metavar="N", type=whole, help="GPUs there are")
    flag("--efficiency", metavar="SHARE", type=share, help="wanted of --gpus or at --speedup, 0 to 1")
    flag("--overhead", metavar="R", type=ratio, help="R_O: overhead over computation")
    flag("--trace", metavar="FILE", help="measure R_O in a trace of torch.profiler")


def _servers(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--parameters", metavar="SIZE", type=size, help="of all parameters (or --model)")
    flag("--model", metavar="MODEL", help=FILE + TORCH)
    flag("--workers", metavar="N", type=whole, required=True)
    flag("--compute", metavar="SECONDS", type=above_zero, required=True, help="of one iteration on a worker")
    flag(
        "--bandwidth", metavar="RATES", type=several(rate), default=(rate("1Gb"), rate("10Gb")), help="default 1Gb,10Gb"
    )


# ---- The arguments of `gpumux tune`.


_TUNE = """\
MODULE:FACTORY is a function of yours, factory(config) -> (step, model, optimizer), the loop body as you would submit
it. Its module also has  batches(config, start)  (training batches from step `start` on),  score(model, config) ->
number  on validation data,  direction = "maximize" or "minimize",  and, for a schedule,  hyperparameters(config, k) ->
{"lr": ...}.

--space is TOML (or JSON), a table for each parameter:
  [lr]
  low = 1e-4
  high = 0.1
  log = true
  fusible = true        changes numbers only: models that differ in it train as one array
  [batch_size]
  choices = [32, 64]    infusible: changes operators or shapes, so it parts trials into arrays

--scheduler says how trials are trained: `fused` as arrays, `concurrent` as jobs of a running daemon, `daemon` as jobs
of which it may run equal ones as one, `serial` one after another, `auto` as arrays where that is expected to end
sooner, else one after another. It changes what a sweep costs, not what it finds. With --storage a sweep that was
ended, or killed, goes on when the same command is run again; Optuna's dashboard reads it. docs/tuning.md says more.

examples:
  gpumux tune clients.digits_sweep:factory --space clients/digits_sweep.toml --trials 16 --steps 400
  gpumux tune clients.digits_sweep:factory --space clients/digits_sweep.toml --algorithm hyperband --steps 810 \\
              --min-steps 30 --storage sqlite:///digits.db --plot digits.png --save best.pt
  gpumux tune my.sweep:factory --space space.json --trials 64 --steps 5000 --scheduler concurrent --concurrent 8

exit codes: 0 done, 1 a trial or request failed, 64 wrong usage, 78 wrong input, 130 interrupted
"""


def natural(text: str) -> int:
    """An integer from 0 up."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return value


def _two(text: str) -> int:
    if (value := whole(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: give 2 or more")
    return value


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpumux tune`."""
    parser.epilog = _TUNE
    flag = parser.add_argument
    flag("task", metavar="MODULE:FACTORY", help="what makes step, model and optimizer of a configuration")
    flag("--space", metavar="FILE", required=True, help="the hyper-parameters, TOML or JSON")
    flag("--steps", metavar="N", type=whole, required=True, help="steps of a trial (at most, with hyperband)")
    flag("--trials", metavar="N", type=whole, help="how many (default with hyperband: one pass over its brackets)")
    flag("--algorithm", choices=("random", "hyperband"), default="random", help="default random")
    flag("--min-steps", metavar="N", type=whole, help="hyperband: of the first rung (default: steps / eta**3)")
    flag("--eta", metavar="N", type=_two, default=3, help="hyperband: one in N goes on to the next rung (default 3)")
    flag("--skip-last", metavar="N", type=natural, default=0, help="hyperband: rungs left out at each bracket's end")
    flag(
        "--sampler", choices=("random", "tpe"), default="random", help="where configurations come from (default random)"
    )
    flag(
        "--scheduler",
        choices=("auto", "serial", "concurrent", "daemon", "fused"),
        default="auto",
        help="default auto",
    )
    flag("--seed", metavar="N", type=int, default=0, help="of configurations, weights and random draws (default 0)")
    flag("--storage", metavar="URL", help="an Optuna storage: sqlite:///FILE (pip install optuna)")
    flag("--study", metavar="NAME", help="the sweep's name in the storage (default: MODULE:FACTORY)")
    flag("--checkpoints", metavar="DIR", help="where trials' states are kept between rungs (default beside --storage)")
    flag("--max-array", metavar="N", type=whole, help="auto and fused: models of an array at most")
    flag(
        "--memory",
        metavar="SIZE",
        type=size,
        help="auto and fused: of an array at most (default: half of what is free)",
    )
    flag("--concurrent", metavar="N", type=whole, default=4, help="concurrent and daemon: jobs at a time (default 4)")
    flag(
        "--endpoint",
        metavar="URL",
        help="which daemon (concurrent, daemon: default GPUMUX_ENDPOINT, GPU 0; auto and fused: default none)",
    )
    flag("--threads", metavar="N", type=whole, help="auto, serial and fused: torch's threads on the CPU")
    flag("--plot", metavar="FILE.png", help="draw scores over steps and time (pip install matplotlib)")
    flag("--save", metavar="FILE.pt", help="write the best trial's state (torch.save)")
    flag("--json", action="store_true", help="print JSON, for scripts")
