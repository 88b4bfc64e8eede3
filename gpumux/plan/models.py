"""Built-in models to plan for: those of the papers, as torch modules. torch is imported when one is built.

Each is built on the meta device unless asked otherwise, so that tracing even a large one takes no memory.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpumux.errors import ConfigError
from gpumux.wording import nearest

if TYPE_CHECKING:
    import torch


BUILT_IN = {
    "alexnet": ("AlexNet in the one-tower form of the guidelines' table 2", (3, 224, 224)),
    "vgg11": ("VGG-11 (DeepPool, figures 1 to 3)", (3, 224, 224)),
    "vgg16": ("VGG-16", (3, 224, 224)),
    "vgg19_bn": ("VGG-19 with batch norm", (3, 224, 224)),
    "resnet50": ("ResNet-50", (3, 224, 224)),
    "wide_resnet101_2": ("WideResNet-101-2", (3, 400, 400)),
    "inception_v3": ("Inception-v3 without the auxiliary head", (3, 299, 299)),
    "transformer": ("an encoder of 6 layers, 512 wide, on sequences of 128 tokens", (128,)),
    "bert_base": ("BERT-base with its head for masked words, on sequences of 384 tokens", (384,)),
    "gpt2": ("GPT-2 small, on sequences of 512 tokens", (512,)),
}
TOKENS = frozenset({"transformer", "bert_base", "gpt2"})  # take tokens, not numbers


class LoadedModel:
    """A torch model and example arguments: `example(n)` gives its arguments for a batch of n."""

    def __init__(self, name: str, module: torch.nn.Module, arguments: Sequence[torch.Tensor]) -> None:
        self.name, self.module = name, module
        self._arguments = tuple(arguments)

    def example(self, batch: int) -> tuple[torch.Tensor, ...]:
        """The arguments with their first sample repeated `batch` times."""
        return tuple(each[:1].expand(batch, *each.shape[1:]).clone() for each in self._arguments)


def find(name: str, shape: Sequence[int] | None = None, *, device: str = "meta") -> LoadedModel:
    """The built-in called `name`, or the result of `module:factory`: a module, which needs the `shape` of one sample of
    its input, or a pair of a module and its arguments (tensors, samples along dimension 0). Built-ins are built on
    `device`; a factory's models are moved there unless it is meta. Raises ConfigError."""
    import torch

    made, arguments = build(name, shape, device=device)
    if not arguments:
        if shape is None:
            raise ConfigError(
                f"{name} makes a model alone",
                "say what one sample looks like with --input 3,224,224, or return examples",
            )
        arguments = (_sample(shape, False),)
    elif shape is not None and name not in BUILT_IN:
        raise ConfigError(
            f"--input with {name}, which returns its example arguments",
            "leave --input out, or let it return a model alone",
        )
    if not all(isinstance(each, torch.Tensor) and each.dim() > 0 and len(each) for each in arguments):
        raise ConfigError(f"{name} has arguments that are no batches", "give tensors with samples along dimension 0")
    if name not in BUILT_IN and device != "meta":
        made, arguments = made.to(device), [each.to(device) for each in arguments]
    return LoadedModel(name.rpartition(":")[2], made, arguments)


def build(
    name: str, shape: Sequence[int] | None = None, *, device: str = "meta"
) -> tuple[torch.nn.Module, Sequence[Any]]:
    """The module that `find` finds, and its example arguments, if it has any. Raises ConfigError."""
    import torch

    if name in BUILT_IN:
        from gpumux.plan import zoo

        with torch.device(device):
            return zoo.BUILDERS[name](), [_sample(shape or BUILT_IN[name][1], name in TOKENS)]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near, known = nearest(name, BUILT_IN), ", ".join(BUILT_IN)
        raise ConfigError(
            f"no model is called {name!r}",
            (f"did you mean {near}? " if near else "") + f"use one of {known}, or module:factory for one of your own",
        )
    try:
        made: Any = _factory(module_name, attribute)()
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(
            f"{name} fails: {type(error).__name__}: {error}", "it is called without arguments; run it by itself first"
        ) from error
    arguments: Sequence[Any] = ()
    if isinstance(made, tuple) and len(made) == 2:
        made, example = made
        arguments = example if isinstance(example, tuple | list) else (example,)
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"{name} makes a {type(made).__name__}", "let it return a torch.nn.Module, or one and its example arguments"
        )
    return made, arguments


def _sample(shape: Sequence[int], tokens: bool) -> torch.Tensor:
    import torch

    return torch.zeros((1, *shape), dtype=torch.int64) if tokens else torch.randn((1, *shape))


def _factory(module: str, attribute: str) -> Callable[[], Any]:
    """The function that the user named; the working directory is on the path, as for `python -m`."""
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"can't import {module}: {error}", "name a module on the path: package.module:factory"
        ) from None
    except AttributeError:
        raise ConfigError(f"{module} has no {attribute}", "name a function of it that makes the model") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ConfigError(f"{module}:{attribute} is no function", "name one that makes the model")
    return found  # type: ignore[no-any-return]
