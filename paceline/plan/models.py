"""The model that a plan is made for, built on the meta device: shapes without memory."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.errors import UserError
from paceline.models.on_meta import on_meta
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.plan.example_inputs import Inputs


def meta_model(name: str) -> nn.Module:
    """Builds a model without allocating its parameters.

    Args:
        name: A preset (`paceline.models.presets`), the path of a Hugging Face config.json, or `module:function`,
            where the function takes nothing and returns an nn.Module, or one and what it is called with.

    Raises:
        UserError: `name` is none of these, what it names builds no model, or transformers is not installed.
    """
    return meta_model_and_inputs(name)[0]


def meta_model_and_inputs(name: str) -> tuple[nn.Module, Inputs | None]:
    """As `meta_model`, with what the model is called with if its function returned that, too: a tensor, a tuple of
    arguments, or a dictionary of named ones.
    """
    # What a model says as it is built is not part of a plan, which may be JSON for another program.
    with contextlib.redirect_stdout(sys.stderr):
        model, inputs = on_meta(lambda: _build(name))
    if not any(True for _ in model.parameters()):
        raise UserError(f"--model {name}: {type(model).__name__} has no parameters")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--model {name}: all parameters are frozen, so that there is no step of training to plan")
    if lazy := [each for each, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UserError(
            f"--model {name}: {lazy[0]} has no shape before the model is called; give its layer the sizes in place of "
            "a lazy one"
        )
    return model, inputs


def _build(name: str) -> tuple[nn.Module, Inputs | None]:
    if name in PRESETS:
        return Transformer(PRESETS[name]), None
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return _hugging_face(path / "config.json" if path.is_dir() else path), None
    if ":" in name:
        return _function(name)
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
    raise UserError(
        f"--model {name}: expected a preset ({', '.join(PRESETS)}), the path of a Hugging Face config.json, or "
        f"module:function{f'; did you mean {near[0]}?' if near else ''}"
    )


def _hugging_face(path: Path) -> nn.Module:
    if not path.is_file():
        raise UserError(f"--model {path}: there is no such file; download the model's config.json first")
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"--model {path}: reading Hugging Face configurations needs transformers: "
            "pip install 'paceline[huggingface]'"
        ) from None
    taken = ""
    try:
        # Code that comes with a model is not run: the path says nothing of who wrote it.
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        if isinstance(layers := getattr(config, "num_hidden_layers", None), int) and layers < 1:
            raise ValueError(f"num_hidden_layers: expected 1 or more, got {layers}")
        if getattr(config, "quantization_config", None):
            raise ValueError("quantization_config: weights are planned as they are trained, whole: leave it out")
        # The class that the file names; where it names none, a language model.
        given: Any = config.architectures or ()
        names = (given,) if isinstance(given, str) else given
        named = [getattr(transformers, name, None) for name in names]
        kind = next((each for each in named if each is not None), None)
        if named and kind is None:
            raise ValueError(
                f"architectures names {names[0]}, which transformers {transformers.__version__} has "
                "not: leave it out to plan what AutoModelForCausalLM makes of the rest"
            )
        if kind is None:
            taken = "; a file that names no class in architectures is taken for a causal language model's"
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        else:
            model = kind(config).to(config.dtype or torch.get_default_dtype())
    except Exception as error:  # whatever a class raises that is given values of another type or range
        said = " ".join(str(error).split())
        raise UserError(f"--model {path}: transformers makes no model of it ({said}){taken}") from error
    return model


def _function(name: str) -> tuple[nn.Module, Inputs | None]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UserError(f"--model {name}: expected module:function, such as my_models:build")
    if os.sep in module_name or module_name.endswith(".py"):
        named = ".".join(Path(module_name).with_suffix("").parts).lstrip("./")
        raise UserError(
            f"--model {name}: expected a module's name, not its file: {named}:{function_name}, importable from here"
        )
    # The modules of the folder that the user stands in, as with python -m.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"--model {name}: there is no module {error.name}; expected module:function, importable from here"
            ) from None
        raise _raised(name, f"importing {module_name}", error) from error
    function: Any = getattr(module, function_name, None)
    if isinstance(function, nn.Module):
        raise UserError(
            f"--model {name}: expected a function that builds the model, got a {type(function).__name__} that is built "
            f"already: name one that does, such as def build(): return {type(function).__name__}(...)"
        )
    if not callable(function):
        raise UserError(f"--model {name}: {module_name} has no function {function_name!r} that returns an nn.Module")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UserError(f"--model {name}: expected a function that takes nothing ({error})") from None
    except ValueError:  # a callable that tells nothing of its arguments
        pass
    try:
        built = function()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = f"{function_name}(), which builds it on the meta device (shapes without values),"
        raise _raised(name, where, error) from error
    pair = isinstance(built, tuple) and len(built) == 2
    model, inputs = built if pair else (built, None)
    if not isinstance(model, nn.Module) or not isinstance(inputs, (Tensor, tuple, Mapping, NoneType)):
        raise UserError(
            f"--model {name}: expected the function to return an nn.Module, or one and what it is called with (a "
            f"tensor, a tuple of arguments or a dict of named ones), got {_named(built)}"
        )
    return model, inputs


def _raised(name: str, what: str, error: Exception | SystemExit) -> UserError:
    """What a user's own code raised, in a sentence, and then its traceback from there on."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    told = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    said = " ".join(str(error).split())
    return UserError(f"--model {name}: {what} raised {type(error).__name__}: {said}\n\n{told}")


def _is_users(file: str) -> bool:
    ours = str(Path(__file__).parents[1])
    return not file.startswith((ours, "<frozen")) and file != importlib.__file__


def _named(built: Any) -> str:
    """Its class; of a tuple those of its items."""
    return f"({', '.join(map(_named, built))})" if isinstance(built, tuple) else type(built).__name__
