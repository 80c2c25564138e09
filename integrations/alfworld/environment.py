"""ALFWorld (Shridhar et al., 2021) as an `Environment`: household tasks in text, played by TextWorld's PDDL engine."""

from collections.abc import Sequence

from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.integrations.alfworld import data
from dreamgym_lg.integrations.alfworld.engine_process import Game
from dreamgym_lg.integrations.alfworld.text import Check, check_action, without_frame
from dreamgym_lg.integrations.text_games.environment import TextGame
from dreamgym_lg.integrations.text_games.text import one_line
from dreamgym_lg.types import StepResult, Task


class ALFWorld(TextGame):
    """One episode at a time of any task of `data.load_tasks`; instances may live in different threads.

    Args:
        max_steps: An episode is truncated after so many steps (the paper's 50); at least 1.
        check: How much `check_action` knows, see `text.check_action`.

    Reward 1 on success, which ends the episode, else 0.
    The first observation is the room alone: the task stands in the instruction. `info["valid"]` says whether the game
    knew the action here and now; it answers both what is impossible and what it does not understand with
    `NOTHING_HAPPENS`, and neither changes anything.

    All instances share a process that plays their games (`engine_process`), one answer at a time: while a game is loaded
    (a second, the same again a tenth), the others wait.
    """

    def __init__(self, *, max_steps: int = 50, check: Check = "names") -> None:
        if max_steps < 1:
            raise ConfigurationError(f"max_steps={max_steps}; allowed: 1 or more")
        self.max_steps, self.check = max_steps, check
        self._game: Game | None = None
        self._steps = 0
        self._over = True

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for a task that is not one of `load_tasks`, `EnvironmentFailed` if the engine breaks."""
        game = data.game_data(task)
        self.close()
        try:
            self._game = Game(game)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"ALFWorld cannot build {task.id}: {error}") from error
        self._steps, self._over = 0, False
        return self.begin(without_frame(self._game.state.text))

    def play(self, action: str) -> StepResult:
        if self._over or self._game is None:
            raise RuntimeError("step called before reset or after the end of the episode")
        # Out of reach of `close` meanwhile: a cancelled episode leaves its thread behind in the game. And should the
        # engine fail now, the episode has ended.
        game, self._game, self._over = self._game, None, True
        action = action.strip()
        valid = action in game.state.admissible
        try:
            game.step(action)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"ALFWorld failed in {action!r}: {error}") from error
        self._game = game
        self._steps += 1
        success = game.state.won
        truncated = not success and self._steps >= self.max_steps
        self._over = success or truncated
        return StepResult(one_line(game.state.text), float(success), success, truncated, {"success": success, "valid": valid})

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations, check=self.check)

    def valid_actions(self) -> list[str]:
        return self._game.state.admissible if self._game is not None else []

    def close(self) -> None:
        game, self._game, self._over = self._game, None, True
        if game is not None:
            game.close()
