"""Loads an agent, or another object, by its place: `my_app.py:graph`, `my_package.module:create`."""

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.simulate.user_code import count_as_users, of_library

T = TypeVar("T")


def load_agent(place: str) -> object:
    """The agent behind `FILE.py:NAME` or `package.module:NAME`, compiled; raises what `load_object` raises."""
    return compiled(load_object(place))


def compiled(agent: object) -> object:
    """A `StateGraph` compiled; anything else as it is."""
    return agent.compile() if hasattr(agent, "compile") and not hasattr(agent, "invoke") else agent


def load_object(place: str, **arguments: object) -> object:
    """The object behind `FILE.py:NAME` or `package.module:NAME`.

    A function is called, with those of `arguments` and `config`, an empty one, that it names; one other positional parameter
    gets the config, too. Raises `ConfigurationError` if there is no such file, module or name, if the function needs more,
    and if loading it raises.
    """
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise ConfigurationError(f"{place!r} names no object; write it as FILE.py:NAME or package.module:NAME")
    module = _loading(source, lambda: _from_file(Path(source)) if source.endswith(".py") else _from_module(source))
    top = sys.modules[module.__name__.partition(".")[0]]
    count_as_users(next(iter(getattr(top, "__path__", ())), top.__file__ or ""))
    if not hasattr(module, name):
        raise ConfigurationError.unknown(f"name in {source}", name, [each for each in vars(module) if not each.startswith("_")])
    value = getattr(module, name)
    is_factory = callable(value) and not hasattr(value, "invoke") and not hasattr(value, "compile")
    return _loading(place, lambda: _called(place, value, {"config": {}, **arguments})) if is_factory else value


def _loading(what: str, load: Callable[[], T]) -> T:
    """Whatever the user's code raises as an error that says where it came from."""
    try:
        return load()
    except (DreamGymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, of a module that is a script
        frames = traceback.extract_tb(error.__traceback__)
        lines = [each for each in frames if not (each.filename.startswith("<") or of_library(each.filename))]
        where = f" at {os.path.relpath(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
        unset = isinstance(error, KeyError) and frames[-1].filename in (os.__file__, "<frozen os>")
        cause = f"the environment variable {error} is not set" if unset else f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{what} could not be loaded: {cause}{where}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file")
    path = path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # in a package: its relative imports need the whole name
        root, name = root.parent, f"{root.name}.{name}"
    sys.path.insert(0, str(root))
    if "." in name:
        return importlib.import_module(name.removesuffix(".__init__"))
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # a second copy would have other functions, which cannot be pickled
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _called(place: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> object:
    Parameter, parameters = inspect.Parameter, inspect.signature(factory).parameters.values()
    named = {each.name: arguments[each.name] for each in parameters if each.name in arguments}
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [each for each in parameters if each.default is Parameter.empty and each.kind in kinds and each.name not in named]
    if len(needed) > 1 or any(each.kind is Parameter.KEYWORD_ONLY for each in needed):
        raise ConfigurationError(
            f"{place} needs {', '.join(each.name for each in needed)}; a function gets what it names of: "
            f"{', '.join(sorted(arguments))}; one other parameter gets an empty config"
        )
    value = factory(*([{}] if needed else []), **named)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[object]) -> object:
    return await value
