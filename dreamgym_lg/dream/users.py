"""Users that talk with an agent."""

from collections.abc import Awaitable, Callable

from dreamgym_lg.dream.parts import Episode


class ScriptedUser:
    """A user that is a function.

    Args: `reply`, (episode) -> the next message, None to end the conversation; may be asynchronous. The agent's message is
    `episode.action`.
    """

    name = "user"

    def __init__(self, reply: Callable[[Episode], "str | None | Awaitable[str | None]"]) -> None:
        self.reply = reply
