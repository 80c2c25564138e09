"""Loads an agent, or anything else of a user's, by where it is written: `my_app.py:graph`, `my_package.module:create`."""

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import TypeGuard, TypeVar

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.simulate.user_code import count_as_users

T = TypeVar("T")


def load_agent(given: str) -> object:
    """The agent behind `FILE.py:NAME` or `package.module:NAME`, compiled; raises what `load_object` raises."""
    return compiled(load_object(given))


def compiled(found: object) -> object:
    """A `StateGraph` compiled; anything else as it is."""
    return found.compile() if hasattr(found, "compile") and not hasattr(found, "invoke") else found


def load_object(given: str) -> object:
    """The object behind `FILE.py:NAME` or `package.module:NAME`. A function is called: with nothing, or with an empty config.

    Raises `ConfigurationError` if there is no such file, module or name, or loading it raises.
    """
    source, _, name = given.rpartition(":")
    if not source or not name:
        raise ConfigurationError(f"{given!r} names no object; write it as FILE.py:NAME or package.module:NAME")
    module = _loading(source, lambda: _from_file(Path(source)) if source.endswith(".py") else _from_module(source))
    top = sys.modules[module.__name__.partition(".")[0]]
    count_as_users(next(iter(getattr(top, "__path__", ())), top.__file__ or ""))
    if not hasattr(module, name):
        raise ConfigurationError.unknown(f"name in {source}", name, [each for each in vars(module) if not each.startswith("_")])
    found = getattr(module, name)
    return _loading(given, lambda: _called(given, found)) if _is_factory(found) else found


def _is_factory(found: object) -> TypeGuard[Callable[..., object]]:
    return callable(found) and not hasattr(found, "invoke") and not hasattr(found, "compile")


def _loading(what: str, load: Callable[[], T]) -> T:
    """Whatever the user's code raises as an error that says where it came from."""
    try:
        return load()
    except (DreamGymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, of a module that is a script
        raise ConfigurationError(f"{what} could not be loaded: {type(error).__name__}: {error}") from error


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
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known  # a second copy would have other functions, which cannot be pickled
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


def _called(given: str, factory: Callable[..., object]) -> object:
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(factory).parameters.values()
    needed = [each for each in parameters if each.default is empty and each.kind in kinds]
    if len(needed) > 1 or any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in needed):
        raise ConfigurationError(
            f"{given} needs {', '.join(each.name for each in needed)}; give a function of nothing, or of a config alone"
        )
    found = factory(*([{}] if needed else []))
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Awaitable[object]) -> object:
    return await found
