"""What scripted policies need of a text game."""

from abc import abstractmethod

from dreamgym_lg.environment import Environment


class TextGame(Environment):
    """An environment that can list its valid actions."""

    max_steps: int
    """How many actions an episode may have."""

    @abstractmethod
    def valid_actions(self) -> list[str]:
        """Every action that the game accepts now, sorted; empty before the first `reset`.

        For scripted policies and tests: a policy under evaluation must not see it.
        """
