"""What the GPU suite needs of this machine before anything of it runs: packages, by importing them; torch with CUDA; a
driver. Needs no GPU, and nothing but the standard library until a package is tried."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = "every daemon and client"
# Module, distribution, what it is for. What only one thing needs says which.
PACKAGES = (
    ("torch", "torch", EVERYTHING),
    ("numpy", "numpy", EVERYTHING),
    ("zmq", "pyzmq", EVERYTHING),
    ("msgpack", "msgpack", EVERYTHING),
    ("safetensors", "safetensors", EVERYTHING),
    ("networkx", "networkx", EVERYTHING),
    ("prometheus_client", "prometheus-client", EVERYTHING),
    ("cuda.bindings.driver", "cuda-bindings", "the device, and the experiments"),
    ("cuda.bindings.nvrtc", "cuda-bindings", "the experiments' kernels"),
    ("triton", "triton", "compiled steps"),
    ("pytest", "pytest", "the tests"),
    ("pytest_timeout", "pytest-timeout", "the tests"),
    ("hypothesis", "hypothesis", "the tests"),
    ("sklearn", "scikit-learn", "the demos' models, in the tests"),
    ("transformers", "transformers", "BERT and GPT-2, in tests and benchmarks"),
)
OURS = ("gpumux.cli.main", "microbench.cuda.smoke", "microbench.overhead_cuda", "microbench.collocate")
IMPORT_S = 120.0
PROGRAM = """
import importlib, sys
from importlib.metadata import version
module, package = sys.argv[1:]
importlib.import_module(module)
print(version(package) if package else "imports")
"""
CUDA = """
import torch
from torch.version import cuda
if cuda is None:
    raise SystemExit(f"torch {torch.__version__} is built without CUDA")
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} for CUDA {cuda} finds no GPU")
print(f"torch {torch.__version__}, CUDA {cuda}, {torch.cuda.get_device_name(0)}")
"""


@dataclass(frozen=True)
class Finding:
    """One thing that is needed: which version was found, or why it can't be used."""

    name: str
    needed_for: str
    found: str
    missing: bool
    remedy: str = ""


def look() -> Iterator[Finding]:
    """Each in a process of its own, which a library that crashes can't take along. Yields what is found as it comes."""
    with ThreadPoolExecutor(8) as threads:
        tests, card = threads.submit(_tests), threads.submit(_card)
        yield from threads.map(lambda package: _package(*package), PACKAGES)
        yield from threads.map(_import, OURS)
        yield tests.result()
        yield card.result()
    for tool, needed_for in (
        ("nvidia-smi", "telling the driver"),
        ("nvidia-cuda-mps-control", "collocation under MPS"),
        ("gcc", "Triton"),
    ):
        there = shutil.which(tool)
        yield Finding(tool, needed_for, there or "not there: what needs it is left out", False)


def row(finding: Finding) -> str:
    width = max(len(name) for name in (*OURS, *(module for module, _, _ in PACKAGES)))
    return f"{'MISSING' if finding.missing else 'ok':<8}{finding.name:<{width}}  {finding.found}"


def _package(module: str, package: str, needed_for: str) -> Finding:
    ok, said = _run(["-c", PROGRAM, module, package])
    remedy = (
        f"pip install {package}; without a network, from a folder of wheels: pip install --no-index --no-deps --target"
        " DIR WHEEL"
    )
    return Finding(module, needed_for, said, not ok, f"{remedy}, with DIR on PYTHONPATH")


def _import(module: str) -> Finding:
    ok, said = _run(["-c", PROGRAM, module, ""])
    return Finding(module, "the suite", said, not ok, "install what it names")


def _tests() -> Finding:
    """Collecting the tests imports all that they do."""
    ok, said = _run(["-m", "pytest", "--collect-only", "-q", "-o", "filterwarnings=default", "tests/gpu"])
    return Finding(
        "tests/gpu",
        "the tests",
        said,
        not ok,
        "run `python -m pytest --collect-only tests/gpu`, and install what it names",
    )


def _card() -> Finding:
    ok, said = _run(["-c", CUDA])
    return Finding("a GPU", "all of it", said, not ok, "take a CUDA build of torch and a machine with a GPU")


def _run(arguments: Sequence[str]) -> tuple[bool, str]:
    """Whether it ended well, and the last line it said."""
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=IMPORT_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return False, f"importing it took more than {IMPORT_S:.0f} s"
    said = ((done.stderr if done.returncode else "") or done.stdout).strip().splitlines()
    return done.returncode == 0, said[-1] if said else f"ended with {done.returncode}"
