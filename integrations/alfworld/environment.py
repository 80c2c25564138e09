"""ALFWorld (Shridhar et al., 2021) as an `Environment`. Household tasks in text, played by TextWorld's PDDL engine."""

from dreamgym_lg.errors import EnvironmentFailed
from dreamgym_lg.integrations.alfworld import data
from dreamgym_lg.integrations.alfworld.engine import Game
from dreamgym_lg.integrations.text_games.game import TextGame, one_line
from dreamgym_lg.types import StepResult, Task


class ALFWorld(TextGame):
    """One episode at a time of any task of `data.load_tasks`. Instances may live in different threads.

    Args: `max_steps`, after which an episode is truncated (the paper's 50); at least 1.

    Reward 1 on success, which ends the episode, else 0. The first observation is the room alone: the task stands in the
    instruction. `info["valid"]` is False for an action that the game does not accept. All instances share a
    process (`engine`), one answer at a time: while a game is loaded (a second, again a tenth), the others wait.
    """

    def __init__(self, *, max_steps: int = 50) -> None:
        super().__init__(max_steps)
        self._game: Game | None = None

    def reset(self, task: Task) -> str:
        """Begin `task`. Raises `ConfigurationError` for one not of `load_tasks`, `EnvironmentFailed` if the engine breaks."""
        game = data.game_data(task)
        self.close()
        try:
            self._game = Game(game)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"ALFWorld cannot build {task.id}: {error}") from error
        introduction = self._game.state.text.split("\n\n")  # a banner, the room, the task, which the instruction holds
        return self.begin(one_line(introduction[1]))

    def play(self, action: str) -> StepResult:
        # out of reach of `close` meanwhile: a cancelled episode leaves its thread behind in the game
        game, self._game = self._game, None
        assert game is not None, "play outside an episode"
        action = action.strip()
        valid = action in game.state.admissible
        try:
            game.step(action)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"ALFWorld failed in {action!r}: {error}") from error
        self._game, success = game, game.state.won
        return StepResult(one_line(game.state.text), float(success), success, False, {"success": success, "valid": valid})

    def valid_actions(self) -> list[str]:
        return self._game.state.admissible if self._game is not None else []

    def close(self) -> None:
        game, self._game, self._seen = self._game, None, ()
        if game is not None:
            game.close()
