"""BFCL as an `Environment`: tool calls and answers as text."""

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.environment import Environment, refused
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.bfcl.apis import BFCLApis, check_call
from dreamgym_lg.types import StepResult, Task

OVER = "The user has no further request."


class BFCLEnvironment(Environment):
    """Actions are those of `dreamgym_lg.actions`: `render_call` calls a tool, `render_answer` ends the user turn.

    What follows an answer is the user's next request; the last answer ends the episode, with reward 1 for success.
    A user turn of more than `max_calls` actions (the ground truth needs up to 34) truncates the episode.
    """

    def __init__(self, *, max_calls: int = 40) -> None:
        if max_calls < 1:
            raise ConfigurationError(f"max_calls={max_calls}; allowed: 1 or more")
        self.max_calls = max_calls
        self._apis: BFCLApis | None = None
        self._calls = 0

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for a task that is not one of `load_tasks`."""
        self._apis, self._calls = BFCLApis(task), 0
        return self._apis.user_turns[0]

    def step(self, action: str) -> StepResult:
        apis = self._playing()
        refusal = check_call(apis.task, action, turn=apis.turn)
        call = parse_action(action) if refusal is None else None
        if isinstance(call, str):
            return self._answered(apis)
        self._calls += 1
        truncated = self._calls > self.max_calls
        if truncated:
            self._apis = None
        if not isinstance(call, ToolCall):
            return refused(refusal or "")._replace(truncated=truncated)
        answer = apis.call(call.name, call.arguments)
        return StepResult(answer.text, 0.0, False, truncated, {"success": False, "valid": answer.valid})

    def _answered(self, apis: BFCLApis) -> StepResult:
        self._calls, request = 0, apis.end_turn()
        if request is not None:
            return StepResult(request, 0.0, False, False, {"success": False, "valid": True})
        self._apis = None
        return StepResult(OVER, apis.reward(), True, False, {"success": apis.success(), "valid": True})

    def _playing(self) -> BFCLApis:
        if self._apis is None:
            raise RuntimeError("no episode is under way: call reset first")
        return self._apis
