"""A text game as an environment: rules of its own stand before the game, and its valid actions can be listed."""

from abc import abstractmethod
from collections.abc import Sequence

from dreamgym_lg.environment import Environment, refused
from dreamgym_lg.types import StepResult


class TextGame(Environment):
    """An environment that can list its valid actions, and refuses what no state of the game allows."""

    max_steps: int
    """Actions of an episode, at most."""
    _seen: Sequence[str] = ()
    """Observations of the running episode, oldest first."""

    @abstractmethod
    def valid_actions(self) -> list[str]:
        """Every action that the game accepts now, sorted; empty before the first `reset`.

        For scripted policies and tests: a policy under evaluation must not see it.
        """

    @abstractmethod
    def play(self, action: str) -> StepResult:
        """Play an action that `check_action` lets through, as `step` does."""

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        """The answer to an action that is invalid whatever the game holds; None to let it be played.

        The same check stands in the dream (`dream.Rules`). Args: `observations`, all of this episode, oldest first.
        """
        return None

    def begin(self, observation: str) -> str:
        """The first observation of an episode; every `reset` ends with it."""
        self._seen = [observation]
        return observation

    def step(self, action: str) -> StepResult:
        """Play one action. One that `check_action` refuses is no real step: its `decided_by` is "rules"."""
        answer = self.check_action(action, self._seen) if self._seen else None
        result = refused(answer) if answer is not None else self.play(action)
        over = result.terminated or result.truncated
        self._seen = [] if over else [*self._seen, result.observation]
        return result
