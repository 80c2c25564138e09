"""A local user in an experiment: trained on the users of recorded conversations."""

from typing import TYPE_CHECKING

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream.goals import talks, write_goals
from dreamgym_lg.dream.users import ModelUser
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.supervised import fine_tune, start_of, tokenized
from dreamgym_lg.experiment.workspace import USER, Workspace

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel

WATCHED = 8
"""Held-out conversations, at most, whose loss ends the training."""


def train_user_model(work: Workspace, model: "StartModel", goals: BaseChatModel | str | None) -> None:
    """Train `models/user` on the users' turns, given goal and history.

    Args: as of `Experiment.train_user`.
    """
    written = run_lasting(write_goals(work.replay_buffer, goals))
    if written.failed:
        work.say(f"{len(written.failed)} recorded users have no goal; the first: {next(iter(written.failed.values()))}")
    user = work.model_user() or ModelUser(None)
    recorded, held_out = (list(filter(talks, each)) for each in work.experience_data())  # the gate goes on with the others
    if not recorded:
        raise ConfigurationError(
            f"{work.out} has no recorded conversation of the split 'train' in which a user replied: give a replay buffer with "
            "such traces, or user=ModelUser(...) with a hosted model"
        )
    start = start_of(work, model)
    rows, watched = (tokenized(start, [user.conversation(each) for each in group]) for group in (recorded, held_out))
    fine_tune(work, "user", start, USER, rows, steps=work.settings.user_steps, held_out=watched[:WATCHED])
