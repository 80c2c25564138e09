"""What the tests of this folder share: tasks of the world that `chat_server` plays, and a key that nothing may hold."""

from dreamgym_lg.types import Task

CANARY = "sk-canary-9f8e7d6c5b4a"


def houses(number: int) -> list[Task]:
    """Tasks that look alike, each a world of its own."""
    return [
        Task(id=f"house {n}", instruction="leave the house", environment="house", observation="A door.") for n in range(number)
    ]
