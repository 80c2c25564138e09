"""Every error this library raises on purpose. A message names what was given, the rule it broke and what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class DreamGymError(Exception):
    """Base of all errors raised by dreamgym-lg."""


class ConfigurationError(DreamGymError, ValueError):
    """An argument is outside what is allowed."""

    @classmethod
    def unknown(cls, kind: str, name: str, allowed: Iterable[str]) -> "ConfigurationError":
        """An unknown name, answered with the nearest known one."""
        names = sorted(allowed)
        near = get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return cls(f"unknown {kind} {name!r}; known: {', '.join(names)}.{hint}")

    @classmethod
    def missing_folder(cls, folder: Path) -> "ConfigurationError":
        """A folder that does not exist, answered with the nearest one beside it."""
        beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
        near = get_close_matches(folder.name, beside, n=1)
        hint = f" Did you mean {str(folder.parent / near[0])!r}?" if near else ""
        return cls(f"the folder {str(folder)!r} does not exist.{hint}")


class UntruthfulDream(ConfigurationError):
    """A dream rewards too many episodes that failed, or no real success."""


class ContextExceeded(ConfigurationError):
    """A conversation and its longest reply exceed a local model's context."""


class MissingDependency(DreamGymError, ImportError):
    """Something that has to be installed first."""

    @classmethod
    def extra(cls, package: str, extra: str) -> "MissingDependency":
        return cls(f"{package} is not installed; run, in the clone of dreamgym-lg: pip install '.[{extra}]'")


class ContractBroken(DreamGymError):
    """An environment breaks a rule that every `Environment` keeps. Raised by `check_environment` alone, for its author."""


class EnvironmentFailed(DreamGymError):
    """An environment, or a part of a dream, raised or died in an episode."""


class AccessBlocked(EnvironmentFailed):
    """The guard or the wall stopped what an agent's code did in a dream. The same episode played again is stopped again."""


class PredictionFailed(DreamGymError):
    """The experience model's answer could not be parsed within its retries."""


class Unanswered(PredictionFailed):
    """No responder of a dream knows the answer. Its group is masked: else the episodes that did not ask would be preferred."""


class UserFault(PredictionFailed):
    """A dreamed user contradicts its goal. The episode is masked: nothing is trained on it, and it is no success.

    Args: `verdict`, of the user's judge; None where the user told what it cannot know.
    """

    def __init__(self, message: str, verdict: Any = None) -> None:
        super().__init__(message)
        self.verdict = verdict


class ModelUnavailable(DreamGymError):
    """A hosted model did not answer, or refused the request. Its message names the server and holds no key."""


class OwnerUnknown(DreamGymError):
    """Code that an episode left behind calls a model or tool. Or a queue brings work from another run."""


class RunStopped(DreamGymError):
    """No episode can be played on; unfinished ones are played next time."""


class BudgetExceeded(RunStopped):
    """The calls, tokens or money that hosted models may cost are spent. Nothing is lost: what was answered is kept."""


class ProcessLost(RunStopped):
    """A process of a browser, a game or a compiled world has died."""


class ServersUnavailable(RunStopped):
    """No server of the local policy has answered."""


class EpisodesMissing(RunStopped):
    """Episodes of an evaluation could not be played. Those that were played are kept; the same call plays the others."""


class ReplayBufferError(DreamGymError):
    """The replay buffer's file is foreign, damaged, newer, or lacks data."""


class CanaryLogError(DreamGymError):
    """The file of a `CanaryLog` is foreign, of another format, locked, or cannot be written."""


class NothingToTrain(DreamGymError):
    """An update without a single trainable token."""


@contextmanager
def writing(path: object, *errors: type[Exception]) -> Iterator[None]:
    """Raise `ConfigurationError` where a file or folder cannot be written, as on a full disk.

    Args: `errors`, what else than an `OSError` that is to the package that writes.
    """
    caught: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except caught as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{path} cannot be written ({why}): free space or permissions, and the same call goes on; or take another folder"
        ) from error
