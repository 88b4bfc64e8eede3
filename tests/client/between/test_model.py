"""Rows M1 to M19, and M23, of docs/plain-loop.md, "Between two steps": what a script does to the model."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from gpumux import client, errors
from gpumux.capture import fetching as overrides
from tests.client.between.support import DATA, Script, X, Y, assert_equal, made, momentum, network, same, whole


def test_m1_calling_the_model_or_a_module_of_it(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(3):
            s.train(2, 2 * i)
            s.model.eval()
            with torch.no_grad():
                out += [s.model(X), s.model[0](X)]
            s.model.train()
        return out

    same(script, endpoint)


class Encoder(nn.Module):
    """Takes the fast path of torch's own encoder layers when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.unsqueeze(1)).squeeze(1))  # type: ignore[no-any-return]


def test_m1_an_evaluation_takes_the_path_it_takes_without_gpumux(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors with torch functions and modules with hooks do not take the fast path."""
    taken: list[bool] = []
    fast = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Any:
        taken.append(True)
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)

    def script(s: Script) -> Any:
        out = []
        for i in range(3):
            s.train(1, i)
            s.model.eval()
            with torch.inference_mode():
                out.append(s.model(X).clone())
            s.model.train()
        return [len(taken), out]

    def fresh(s: Script) -> Any:
        taken.clear()
        return script(s)

    assert same(fresh, endpoint, make=Encoder)[0] == 6


def test_m1_after_the_fetch_all_is_as_without_gpumux(endpoint: str) -> None:
    with made(endpoint) as s:
        classes = {name: type(t) for name, t in s.model.state_dict(keep_vars=True).items()}
        s.train(1)
        s.model.eval()(X)
        for name, tensor in s.model.state_dict(keep_vars=True).items():
            assert type(tensor) is classes[name]
            assert not torch.overrides.has_torch_function((tensor,))
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert all(not m._forward_pre_hooks and not m._state_dict_pre_hooks for m in s.model.modules())
        assert type(s.optimizer.state) is not dict
        s.train(1)
    assert type(s.optimizer.state).__name__ == "defaultdict"
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.covering
@pytest.mark.parametrize(
    "reference",
    [
        lambda m: m[0].weight,
        lambda m: next(iter(m.parameters())),
        lambda m: m[0].weight.data,
        lambda m: m[0].weight.detach(),
        lambda m: m[0].weight.view(-1)[3:],
        lambda m: m[1].running_mean,
        lambda m: m[1].running_mean[2:],
    ],
    ids=["attribute", "list", "data", "detach", "view", "buffer", "view of a buffer"],
)
@pytest.mark.parametrize("early", [True, False], ids=["before submit", "between steps"])
def test_m2_a_torch_function_by_whatever_reference(reference: Any, early: bool, endpoint: str) -> None:
    kept: list[Any] = []

    def network_with_alias() -> Any:
        model = network()
        kept.append(reference(model))
        return model

    def script(s: Script) -> Any:
        out = []
        s.train(1)
        if not early:
            kept.append(reference(s.model))
        alias = kept[-1]
        for i in range(1, 4):
            s.train(1, i)
            out += [alias.sum(), torch.linalg.vector_norm(alias), alias + 1, torch.cat([alias, alias])]
            if i == 2:
                out.append(str(alias))
        return out

    same(script, endpoint, make=network_with_alias)


# Functions that call no `__torch_function__`, by torch.overrides.get_ignored_functions() or because no argument is a
# tensor.
UNASKED = {
    "tensor": lambda p: torch.tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64, requires_grad=False),
    "new_tensor": lambda p: torch.zeros(1).new_tensor(p),
    "new": lambda p: torch.zeros(1).new(p),
    "as_subclass": lambda p: p.as_subclass(Tensor) + 0,
    "set_": lambda p: torch.empty(0).set_(p.data) + 0,
    "set_ of the parameter": lambda p: torch.empty(0).set_(p) + 0,
    "_make_subclass": lambda p: Tensor._make_subclass(Tensor, p) + 0,
    "Parameter": lambda p: nn.Parameter(p) + 0,
    "sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(torch.arange(p.numel())[None], p.flatten()).to_dense(),
    "sparse_coo_tensor of the parameter": lambda p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p).to_dense(),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p, p]).to_padded_tensor(0.0),
    "func.grad": lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
    "func.vjp": lambda p: torch.func.vjp(lambda q: q * 2, p)[0],
    "func.jvp": lambda p: torch.func.jvp(lambda q: q * 2, (p,), (p,)),
    "func.jacrev": lambda p: torch.func.jacrev(lambda q: (q * q).sum(0))(p),
    "func.jacfwd": lambda p: torch.func.jacfwd(lambda q: (q * q).sum(0))(p),
    "func.hessian": lambda p: torch.func.hessian(lambda q: (q * q * q).sum())(p),
    "vmap": lambda p: torch.func.vmap(lambda q: q * 2)(p),
    "an output's gradient": lambda p: _gradient_of(lambda y, x: y.backward(p), p.shape),
    "an output's gradient, by grad": lambda p: _gradient_of(lambda y, x: torch.autograd.grad(y, x, p)[0], p.shape),
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.data)) + 0,
    "a scripted function": lambda p: _doubled()(p),
    "torch.to_dlpack": lambda p: torch.from_dlpack(torch.to_dlpack(p.detach())) + 0,
}


def _gradient_of(backward: Any, shape: Any) -> Any:
    x = torch.ones(shape, requires_grad=True)
    out = backward(x * 3, x)
    return x.grad if out is None else out


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", UNASKED)
@pytest.mark.every(3)
def test_m2_what_asks_no_torch_function(name: str, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(2):
            s.train(1, i)
            out.append(UNASKED[name](s.model[0].weight))
            s.train(1, i)
            if s.job is not None:
                assert s.job._staleness.stale  # so that the next way reads a stale tensor
        return out

    same(script, endpoint)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_m2_scripts_that_make_tensors_still_compile() -> None:
    """torch.jit knows builtins by identity."""
    overrides.install()
    scripted = torch.jit.script(_makes_tensors)
    assert scripted(2.0).tolist() == [2.0, 1.0]


def test_m2_functions_are_pickled_by_their_names() -> None:
    """As a DataLoader pickles its collate function for spawned workers, which do not import gpumux."""
    overrides.install()
    for function, name in (
        (torch.tensor, b"tensor"),
        (torch.as_tensor, b"as_tensor"),
        (Tensor.new_tensor, b"Tensor.new_tensor"),
        (torch.utils.dlpack.to_dlpack, b"_to_dlpack"),
        (torch.nested.nested_tensor, b"nested_tensor"),
    ):
        pickled = pickle.dumps(function)
        assert pickle.loads(pickled) is function  # noqa: S301 - our own bytes
        assert name in pickled
        assert b"gpumux" not in pickled


def _twice(x: Tensor) -> Tensor:
    return x * 2


@functools.cache
def _doubled() -> Any:
    return torch.jit.script(_twice)


def _of_list(x: list[Tensor], y: dict[str, Tensor], z: tuple[int, Tensor]) -> Tensor:
    return x[0] + y["a"] + z[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("of", [0, 1, 2], ids=["list", "dictionary", "tuple"])
def test_m2_containers_given_to_a_scripted_function(of: int, endpoint: str) -> None:
    """C++ reads what is in them."""
    scripted = torch.jit.script(_of_list)

    def script(s: Script) -> Any:
        s.train(1)
        given = [torch.zeros(8, 6)] * 3
        given[of] = s.model[0].weight
        return scripted([given[0]], {"a": given[1]}, z=(1, given[2]))

    same(script, endpoint)


def _makes_tensors(x: float) -> Tensor:
    return torch.stack([torch.tensor(x), torch.as_tensor(1.0)])


# Row M2: a 0-dim tensor that is used as a plain number.
_NOT_SEEN = {f"torch.{name}" for name in ("arange", "eye", "full", "randperm", "range", "scalar_tensor")}


def test_m2_functions_that_ask_no_torch_function_are_all_known() -> None:
    """All functions of torch's list, also those that a new torch adds. In a process of its own, because some change
    torch's settings."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.client.between.unasked"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == _NOT_SEEN


@pytest.mark.parametrize("early", [True, False], ids=["before submit", "between steps"])
@pytest.mark.usefixtures("freezes")
def test_m2_an_alias_that_the_garbage_collector_does_not_list(early: bool, endpoint: str) -> None:
    """Scripts call `gc.freeze()` before they fork, or after their first step, so that collections are quicker."""

    def script(s: Script) -> Any:
        s.train(1)
        made.append(s.model[0].weight.data)
        if not early:
            gc.freeze()
        out = []
        for i in range(1, 3):
            s.train(1, i)
            out += [alias.sum() for alias in made]
        return out

    made: list[Tensor] = []

    def network_with_alias() -> Any:
        model = network()
        made[:] = [model[0].weight.detach().view(-1)]
        if early:
            gc.freeze()
        return model

    same(script, endpoint, make=network_with_alias)


def test_m2_an_alias_of_an_alias_made_while_others_come_and_go(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out, alias = [], None
        for i in range(5):
            s.train(1, i)
            old, alias = alias, s.model[0].weight.data
            out.append(alias.sum())
            if old is not None:
                out.append(old.sum())
        return out

    same(script, endpoint)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "way",
    [
        lambda m: m.state_dict(),
        lambda m: torch.load(_saved(m), weights_only=False).state_dict(),
        lambda m: torch.load(_saved(m.state_dict())),
        lambda m: copy.deepcopy(m).state_dict(),
        lambda m: copy.deepcopy(m[3]).state_dict(),
        lambda m: pickle.loads(pickle.dumps(m)).state_dict(),  # noqa: S301 - our own bytes
        lambda m: copy.deepcopy(m[0].weight),
        lambda m: copy.copy(m[0].weight),
        lambda m: pickle.loads(pickle.dumps(m[0].weight)),  # noqa: S301
        lambda m: torch.load(_saved(m[0].weight)),
        lambda m: copy.deepcopy(dict(m.named_buffers())),
        lambda m: repr(m[0].weight),
        lambda m: m[0].weight.tolist(),
    ],
    ids=[
        "state_dict", "torch.save", "torch.save of a state_dict", "deepcopy", "of a module", "pickle",
        "deepcopy of a parameter", "copy of a parameter", "pickle of a parameter", "torch.save of a parameter",
        "deepcopy of buffers", "repr", "tolist",
    ],
)  # fmt: skip
def test_m3_copies_and_pickles(way: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        out = way(s.model)
        if isinstance(out, Tensor):
            assert type(out) is nn.Parameter
        s.train(1, 2)
        return out

    same(script, endpoint)


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_m3_a_copy_is_free_of_gpumux(endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        twin = copy.deepcopy(s.model)
        s.train(1)
        before = twin[0].weight.clone()
        s.train(1)
        assert torch.equal(twin[0].weight, before)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        torch.optim.SGD(twin.parameters(), lr=0.1)
        twin(X).sum().backward()


def test_m4_averages(endpoint: str) -> None:
    def script(s: Script) -> Any:
        averaged = torch.optim.swa_utils.AveragedModel(
            s.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        by_hand = {k: v.detach().clone() for k, v in s.model.named_parameters()}
        plain = torch.optim.swa_utils.AveragedModel(s.model)
        for i in range(5):
            s.train(1, i)
            averaged.update_parameters(s.model)
            if i % 2:
                plain.update_parameters(s.model)
            with torch.no_grad():
                for k, v in s.model.named_parameters():
                    by_hand[k].mul_(0.9).add_(v, alpha=0.1)
        return averaged.state_dict(), plain.state_dict(), by_hand

    same(script, endpoint)


def test_m4_an_average_every_step_brings_no_optimizer_state_and_is_said(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with made(endpoint) as s, caplog.at_level(logging.INFO, "gpumux.client"):
        assert s.job is not None
        pulled: list[int] = []
        pull = s.job._remote.pull

        def counted(write: Any, wanted: Any = None) -> None:
            pulled.append(sum(s.job._table.buffers[b].nbytes for b in wanted))  # type: ignore[union-attr]
            pull(write, wanted)

        s.job._remote.pull = counted  # type: ignore[method-assign]
        for i in range(6):
            s.train(1, i)
            s.model[0].weight.sum()
        of_model = sum(t.nbytes for t in s.model.state_dict().values())
        assert pulled == [of_model] * 6
        for i in range(4):  # another epoch, after two steps without a read
            s.train(2 if i == 0 else 1, i)
            s.model[0].weight.sum()
    said = [r for r in caplog.records if "reads the local model" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.INFO, logging.WARNING]
    assert "test_model.py:" in said[0].getMessage()
    assert "after every step" in said[1].getMessage()


def test_m5_norms_histograms_and_vectors(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(3):
            s.train(1, i)
            out.append([p.norm() for p in s.model.parameters()])
            out.append([torch.histc(p.detach(), 5) for p in s.model.parameters()])
            out.append(torch.nn.utils.parameters_to_vector(s.model.parameters()))
            out.append([p.abs().max().item() for p in s.model.parameters()])
        return out

    same(script, endpoint)


def fill(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


@pytest.mark.covering
@pytest.mark.parametrize(
    "write",
    [
        fill,
        lambda m: m[0].reset_parameters(),
        lambda m: nn.init.constant_(m[0].weight, 0.25),
        lambda m: m[0].weight.data.clamp_(-0.01, 0.01),
        lambda m: m[0].weight.data.copy_(torch.ones(8, 6)),
        lambda m: setattr(m[0].weight, "data", torch.zeros(8, 6)),
        lambda m: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}),
        lambda m: setattr(m[1], "running_mean", torch.ones(8)),
        lambda m: m[1].reset_running_stats(),
        lambda m: m[1].running_var.data.fill_(2.0),
        lambda m: m.get_buffer("1.running_mean").detach().numpy().__setitem__(0, 5.0),
        lambda m: numpy.from_dlpack(m[0].weight.detach()).sum() and m[0].weight.detach().numpy().fill(1.0),
    ],
    ids=[
        "M6 in place", "M6 reset_parameters", "M6 nn.init", "M7 clipped data", "M7 copied data", "M7 data set",
        "M8 load_state_dict", "M9 buffer replaced", "M11 reset_running_stats", "M11 data of a buffer", "M14 numpy",
        "M14 numpy of a parameter",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "then",
    [lambda s: None, lambda s: len(s.optimizer.state), lambda s: s.model[0].bias.grad],
    ids=["at once", "optimizer's state read", "gradient looked at"],
)
def test_m6_m7_m8_m9_m11_m14_a_write_is_noticed_and_load_state_answers_it(then: Any, write: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        torch.manual_seed(1)
        write(s.model)
        then(s)
        if s.job is not None:
            with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
                s.step(*DATA[2])
            s.job.load_state()
        return s.train(2, 2)

    same(script, endpoint)


def test_m9_a_forward_in_training_mode_writes_buffers_and_the_error_names_one(endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        with torch.no_grad():
            s.model(X)  # as an evaluation that forgot model.eval()
        with pytest.raises(errors.LocalWrite, match=r"changed \(1\.num_batches_tracked\) while"):
            s.step(X, Y)


def test_m6_vector_to_parameters_puts_them_into_other_memory(endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        vector = torch.nn.utils.parameters_to_vector(s.model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector, s.model.parameters())
        with pytest.raises(errors.LocalWrite):
            s.step(X, Y)
        assert s.job is not None
        with pytest.raises(errors.CaptureError, match="close the job and submit the step again"):
            s.job.load_state()


def test_m7_weight_clipping_before_the_first_step_is_noticed_too(endpoint: str) -> None:
    with made(endpoint) as s:
        s.model[0].weight.data.clamp_(-0.01, 0.01)
        with pytest.raises(errors.LocalWrite):
            s.step(X, Y)


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(8, 6))),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    ],
    ids=["a parameter", "an equal parameter"],
)
def test_m9_a_parameter_that_is_replaced_is_refused(replace: Any, endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        replace(s.model)
        with pytest.raises((errors.LocalWrite, errors.CaptureError)):
            s.step(X, Y)


@pytest.mark.parametrize(
    "put",
    [lambda m: m.__setitem__(0, nn.Linear(6, 8)), lambda m: m.add_module("more", nn.Linear(3, 3))],
    ids=["in the place of another", "at the end"],
)
def test_m9_a_module_that_is_put_into_the_model_is_not_trained_by_the_old_optimizer(put: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(1)
        put(s.model)
        return [out, s.train(1), [p.grad is None for p in s.model.parameters()]]

    same(script, endpoint)


def test_m10_modes_and_frozen_parameters(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(1)
        s.model.eval()
        out += s.train(1, 1)
        s.model.train()
        s.model[0].requires_grad_(False)
        out += s.train(2, 2)
        s.model[0].weight.requires_grad = True
        return out + s.train(1, 4)

    same(script, endpoint, max_variants=8)


def test_m11_buffers_are_read(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        out = [s.model[1].running_mean, s.model[1].running_var + 0, s.model[1].num_batches_tracked.item()]
        s.train(1, 2)
        return [*out, dict(s.model.named_buffers())]

    same(script, endpoint)


@pytest.mark.parametrize("move", [lambda m: m.double(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_m12_another_type_is_noticed(move: Any, endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        move(s.model)
        with pytest.raises(errors.LocalWrite):
            s.step(X, Y)


def test_m12_a_move_to_where_the_model_is_changes_nothing(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        s.model.to("cpu").float()
        return s.train(2, 1)

    same(script, endpoint)


def test_m13_hooks_are_another_case_and_parametrized_weights_are_noticed(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(1)
        handle = s.model[0].register_forward_hook(lambda m, i, o: o * 2)
        out += s.train(2, 1)
        handle.remove()
        return out + s.train(1, 3)

    same(script, endpoint)
    for change in (
        lambda m: torch.nn.utils.parametrizations.weight_norm(m[0]),
        lambda m: prune.random_unstructured(m[0], "weight", 0.5),
    ):
        with made(endpoint) as s:
            s.train(1)
            change(s.model)
            with pytest.raises((errors.LocalWrite, errors.CaptureError)):
                s.step(X, Y)


def test_m14_arrays_made_between_steps_are_up_to_date(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        out = [s.model[0].weight.detach().numpy().tolist(), numpy.asarray(s.model[1].running_mean).tolist()]
        s.train(1, 2)
        out.append(numpy.from_dlpack(s.model[0].weight.detach()).tolist())
        s.train(1, 3)
        return [*out, torch.from_dlpack(s.model[0].weight.detach())]

    same(script, endpoint)


def test_m15_an_attribute_that_the_step_reads(endpoint: str) -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def script(s: Script) -> Any:
        out = s.train(2)
        s.model.scale = 0.5
        return out + s.train(2, 2)

    same(script, endpoint, make=lambda: Scaled(6, 3))


def test_m16_another_thread_reads_the_model(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = []

        def read(barrier: threading.Barrier) -> None:
            barrier.wait()
            out.append(s.model[0].weight.sum().item())

        for i in range(3):
            s.train(1, i)
            barrier = threading.Barrier(3)
            threads = [threading.Thread(target=read, args=(barrier,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return out

    same(script, endpoint)


def test_m16_another_thread_reads_while_this_one_steps(endpoint: str) -> None:
    """What it sees is the whole state after one of the steps, never parts of two, and never older than before."""
    with made(None) as plain:
        after = [plain.model.state_dict()["0.weight"].clone()]
        for i in range(len(DATA)):
            plain.train(1, i)
            after.append(plain.model.state_dict()["0.weight"].clone())
    with made(endpoint) as s:
        done = threading.Event()
        seen: list[Tensor] = []

        def read() -> None:
            while not done.is_set():
                seen.append(s.model[0].weight.detach().clone())

        thread = threading.Thread(target=read)
        thread.start()
        s.train(len(DATA))
        done.set()
        thread.join()
    which = [[i for i, weight in enumerate(after) if torch.equal(weight, found)] for found in seen]
    assert all(which)
    assert sorted(which) == which


def test_m16_a_forked_process_can_not_fetch(endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                s.model[0].weight.sum()
            except errors.StaleState as error:
                code = 7 if "forked" in error.message and "job.sync()" in error.remedy else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        s.model[0].weight.sum()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "trace",
    [
        lambda m: torch.jit.trace(m, X)(X),
        lambda m: torch.fx.symbolic_trace(m)(X),
        lambda m: torch.export.export(m, (X,)).module()(X),
        lambda m: torch.compile(m, backend="eager")(X),
        lambda m: torch.compile(lambda x: F.linear(x, m[0].weight), backend="eager")(X),
        lambda m: torch.func.functional_call(m, dict(m.named_parameters()), X),
        lambda m: torch.func.grad(lambda w: F.linear(X, w, m[0].bias).sum())(m[0].weight),
        lambda m: torch.func.vmap(lambda x: F.linear(x, m[0].weight))(X),
        lambda m: torch.func.grad(lambda x: F.linear(x, m[0].weight).sum())(X),
    ],
    ids=[
        "jit.trace",
        "fx",
        "export",
        "compile",
        "compiled function",
        "functional_call",
        "func.grad",
        "vmap",
        "grad of a closure",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_m17_traces_see_the_newest_weights(trace: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(2):
            s.train(1, i)
            s.model.eval()
            out.append(trace(s.model))
            s.model.train()
        torch._dynamo.reset()
        return out

    same(script, endpoint)


def in_place(module: nn.Module, **options: Any) -> Any:
    module.compile(backend="eager", **options)
    return module


def through_a_function(module: nn.Module, **options: Any) -> Any:
    holder = SimpleNamespace(models=[module])
    return torch.compile(lambda x: holder.models[0](x), backend="eager", **options)


def wrapped(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="eager", **options)


@pytest.mark.parametrize("early", [False, True], ids=["compiled later", "compiled before"])
@pytest.mark.parametrize(
    ("made_of", "own", "whole_graph"),
    [
        (wrapped, False, True), (through_a_function, False, True), (in_place, False, False), (wrapped, True, True),
        (through_a_function, True, True), (through_a_function, True, False),
    ],
)  # fmt: skip
@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore")
def test_m17_compiled_models_are_called_while_the_state_is_behind(
    made_of: Any, own: bool, whole_graph: bool, early: bool, endpoint: str
) -> None:
    """The job's own model, and one that has nothing to do with it, whose compiler meets the hook on modules."""

    def script(s: Script) -> Any:
        torch.manual_seed(3)
        s.model.eval()
        module = s.model if own else network().eval()
        compiled = made_of(module, fullgraph=whole_graph) if early else None
        out = []
        for i in range(4):
            s.train(1, i)
            compiled = compiled or made_of(module, fullgraph=whole_graph)
            with torch.no_grad():
                out.append(compiled(X))
        torch._dynamo.reset()
        return out

    same(script, endpoint)


@pytest.mark.filterwarnings("ignore")
def test_m17_a_compiled_function_that_leads_to_more_than_is_looked_at_has_all_fetched(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.model.eval()
        held = [s.model, *range(600)]
        compiled = torch.compile(lambda x: held[0](x), backend="eager", fullgraph=True)
        out = []
        for i in range(2):
            s.train(1, i)
            with torch.no_grad():
                out.append(compiled(X))
        torch._dynamo.reset()
        return out

    same(script, endpoint)


def test_m18_parameters_in_shared_memory_are_refused(endpoint: str) -> None:
    model = network()
    model.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.CaptureError, match=r"0\.weight lies in memory that processes share .*copy\.deepcopy"):
        client.submit(whole(model, optimizer), example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint)


def test_m18_parameters_moved_there_later_are_noticed(endpoint: str) -> None:
    with made(endpoint, optimize=momentum) as s:
        s.train(1)
        s.model.share_memory()
        with pytest.raises((errors.LocalWrite, errors.CaptureError)):
            s.step(X, Y)


def test_m18_weights_of_a_mapped_file_are_the_jobs_own(endpoint: str, tmp_path: Any) -> None:
    torch.save(network().state_dict(), tmp_path / "weights.pt")

    def make() -> nn.Module:
        model = network()
        model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
        return model

    same(lambda s: s.train(2), endpoint, make=make)


SAVED = {
    "jit.save": lambda m: m,
    "deepcopy": copy.deepcopy,
    "freeze": lambda m: torch.jit.freeze(m.eval()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("make", [lambda m: torch.jit.trace(m, X), torch.jit.script], ids=["traced", "scripted"])
def test_m17_a_torchscript_module_made_earlier_is_saved_as_it_is_now(make: Any, how: str, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.model.eval()
        scripted = make(s.model)
        s.model.train()
        out = []
        for i in range(2):
            s.train(1, i)
            file = io.BytesIO()
            torch.jit.save(SAVED[how](scripted), file)
            file.seek(0)
            out.append(torch.jit.load(file)(X))
        return out

    same(script, endpoint)


@pytest.mark.parametrize("hidden", ["graph", "capsule"])
def test_m2_an_alias_in_the_place_of_a_reference_that_no_object_has(hidden: str, endpoint: str) -> None:
    """The storage counts as many references as before."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(1)
        reference: Any = (
            s.model[0](X).sum() if hidden == "graph" else torch.utils.dlpack.to_dlpack(s.model[0].weight.detach())
        )
        out += s.train(1, 1)
        s.model[0].weight.sum()
        reference = None
        alias = s.model[0].weight.data
        out += s.train(1, 2)
        return [*out, alias.sum(), reference]

    same(script, endpoint)


def test_m2_an_alias_beside_a_nested_tensor_over_the_same_memory(endpoint: str) -> None:
    """The nested tensor and the one inside of it are two objects with one reference to the memory."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(1)
        nested = torch.nested.nested_tensor_from_jagged(s.model[0].weight.data.view(-1), torch.tensor([0, 6, 48]))
        out += s.train(1, 1)
        out.append(nested.values().clone())
        alias = s.model[0].weight.data
        out += s.train(1, 2)
        out.append(alias.clone())
        return out

    same(script, endpoint)


def test_m2_new_aliases_are_found_without_a_search_of_all_objects(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a target network follows by state dictionaries: target.load_state_dict(...)."""
    searched: list[Any] = []
    get_objects = gc.get_objects

    def counted(generation: int | None = None) -> Any:
        searched.append(generation)
        return get_objects(generation)

    def script(s: Script) -> Any:
        out = s.train(1)
        state = s.model.state_dict()
        out += s.train(1, 1)
        searched.clear()
        for i in range(2, 5):
            state = {name: tensor.data for name, tensor in s.model.state_dict().items()}
            out += s.train(1, i)
        return [*out, [tensor.sum() for tensor in state.values()]]

    monkeypatch.setattr(gc, "get_objects", counted)
    same(script, endpoint)
    assert 0 in searched
    assert None not in searched


def test_m2_a_graph_that_is_kept_from_step_to_step_is_worth_a_warning(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(12):
            out += s.train(1, i % 4)
            s.model.eval()
            kept = s.model(X).sum()
            s.model.train()
            out.append(kept.item())
        return out

    same(script, endpoint)
    assert caplog.text.count("under torch.no_grad()") == 1


def test_m2_the_class_of_a_parameter_that_is_behind(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        weight = s.model[0].weight
        kind = isinstance(weight, nn.Parameter), issubclass(type(weight), nn.Parameter), type(weight).__name__
        weight.sum()
        return [*kind, type(weight) is nn.Parameter]

    same(script, endpoint)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_m2_a_tensor_of_another_layout_over_a_parameters_memory(kind: str, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = s.train(1)
        if kind == "sparse":
            other = torch.sparse_coo_tensor(torch.arange(8).expand(2, 8), s.model[0].bias.data, (8, 8))
        else:
            offsets = torch.tensor([0, 6, 48])
            other = torch.nested.nested_tensor_from_jagged(s.model[0].weight.data.view(-1), offsets)
        for i in range(1, 4):
            out += s.train(1, i)
            out.append(other.to_dense() if kind == "sparse" else other.values().clone())
        return out

    same(script, endpoint)


# ---- several jobs over one model


def _scale(model: Any) -> Any:
    return lambda x: model[0](x).sum()


@pytest.mark.parametrize("load", [True, False], ids=["load_state first", "noticed"])
def test_m23_a_model_that_another_job_has_trained_is_noticed(load: bool, endpoint: str) -> None:
    """A step of the other job would go on from the parameters that it was submitted with."""
    out = []
    for at in (None, endpoint):
        with made(at) as s:
            if at is None:
                out.append([s.train(2), _scale(s.model)(X).item(), s.train(1, 2), _scale(s.model)(X).item()])
                continue
            with client.submit(_scale(s.model), example=(X,), model=s.model, endpoint=endpoint) as other:
                found: list[Any] = []
                for start, count in ((0, 2), (2, 1)):
                    found.append(s.train(count, start))
                    if not load:
                        with pytest.raises(errors.LocalWrite, match=r"another job has trained .*job\.add\(step\)"):
                            other.step(X)
                    other.load_state()
                    found.append(other.step(X).item())
            out.append(found)
    assert out[1] == out[0]


def test_m23_two_jobs_that_train_one_model_in_turn(endpoint: str) -> None:
    """With `load_state()` before each turn, as the error says."""
    states = []
    for at in (None, endpoint):
        with made(at, optimize=momentum) as s:
            second = torch.optim.SGD(s.model.parameters(), lr=0.01)
            step = whole(s.model, second)
            if at is None:
                s.train(2)
                step(*DATA[2])
                s.train(1, 3)
            else:
                with client.submit(step, example=(X, Y), model=s.model, optimizer=second, endpoint=endpoint) as other:
                    s.train(2)
                    other.load_state()
                    other.step(*DATA[2])
                    assert s.job is not None
                    with pytest.raises(errors.LocalWrite, match="another job has trained"):
                        s.step(*DATA[3])
                    s.job.load_state()
                    s.train(1, 3)
        states.append({key: value.clone() for key, value in s.model.state_dict().items()})
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())


def test_m23_a_job_that_is_submitted_again_outlives_the_older_one(endpoint: str) -> None:
    """As where a notebook's cell runs again: the older job is closed last, or first."""
    found = []
    for older_first in (None, True, False):
        torch.manual_seed(7)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step = whole(model, optimizer)
        if older_first is None:
            for i in range(4):
                step(*DATA[i])
        else:
            jobs = []
            for start in (0, 2):
                jobs.append(client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint))
                for i in (start, start + 1):
                    jobs[-1].step(*DATA[i])
            for job in jobs if older_first else reversed(jobs):
                job.close()
        found.append(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
    for ours in found[1:]:
        assert_equal(ours, found[0])
