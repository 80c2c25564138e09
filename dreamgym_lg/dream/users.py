"""Users that talk with an agent."""

from collections.abc import Awaitable, Callable, Collection

from dreamgym_lg.actions import parse_call
from dreamgym_lg.dream.parts import Episode, User


class ScriptedUser:
    """A user that is a function.

    Args: `reply`, (episode) -> the next message, None to end the conversation; may be asynchronous. The agent's message is
    `episode.action`.
    """

    name = "user"

    def __init__(self, reply: Callable[[Episode], "str | None | Awaitable[str | None]"]) -> None:
        self.reply = reply


class UntilHandOver:
    """A user that leaves once the agent has called a tool that hands them over, to a person say.

    Args: `user`, replies until then; `tools`, names of such tools.
    """

    name = "user"

    def __init__(self, user: User, tools: Collection[str]) -> None:
        self.user, self.tools = user, frozenset(tools)
        for key in ("model", "hosted", "version"):
            setattr(self, key, getattr(user, key, None))

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        calls = (parse_call(step.action) for step in episode.steps if step.valid)
        return None if any(call is not None and call.name in self.tools for call in calls) else self.user.reply(episode)
