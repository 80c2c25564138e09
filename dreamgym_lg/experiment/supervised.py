"""Supervised training of the experience model and the user. Training of policies shares some functions."""

import json
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from dreamgym_lg.dream.annotate import Annotate, annotate
from dreamgym_lg.dream.goals import has_user_turns, write_goals
from dreamgym_lg.dream.judges import ends_with_message, judge_conversations
from dreamgym_lg.dream.users import ModelUser
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.experience_models import as_trained
from dreamgym_lg.experiment.workspace import DATA, EXPERIENCE, USER, Workspace, held_out_tasks
from dreamgym_lg.fidelity.edits import edited_successes
from dreamgym_lg.files import write_whole
from dreamgym_lg.hosted import load_chat_model
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Segment, Source, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    StartModel = LocalChatModel | str | Path | None
    """A local model, its path or hub name; None for `Settings.model`."""

FEW_EPISODES = 20
"""Recorded episodes below which a warning says that there are few."""
MAX_HELD_OUT = 32
"""Maximum held-out episodes for early stopping of the experience model; of the user, a quarter."""


def train_experience_model(
    work: Workspace, model: "StartModel" = None, annotator: BaseChatModel | Annotate | str | None = None
) -> None:
    """Train `models/experience-0` to answer and judge as the offline trajectories show.

    Args: `model`, its initial weights; `annotator`, writes missing reasoning of steps, in place of a rule.
    """
    write_reasoning = _to_annotate(annotator)
    if write_reasoning is not None:
        _annotate(work, work.replay_buffer, write_reasoning)
    if not work.offline():
        raise ConfigurationError(
            f"{work.out} has no recorded trajectory of the split 'train' to learn from: call collect() first; for a DreamGym, "
            "give a replay buffer with traces (load_traces, `dreamgym import`)"
        )
    check_outcomes(work, "an experience model learns from them what to reward")
    _record_data(work)
    train, held_out = (work.world.as_dreamed(episodes) for episodes in work.experience_data())
    start, edited = start_of(work, model, f"{EXPERIENCE}-start"), list[Trajectory]()
    if any(map(ends_with_message, train)):
        edited = _edited(work, train, write_reasoning)
        _check_judged(work, train, edited)
    held_out_rows = _rows(work, start, held_out[:MAX_HELD_OUT])
    rows, steps = _rows(work, start, train, edited), work.settings.experience_steps
    _warn_of_cut_answers(work, rows)
    fine_tune(work, "experience model", start, EXPERIENCE, rows, steps=steps, held_out=held_out_rows)


def check_outcomes(work: Workspace, why: str) -> None:
    """Raise `ConfigurationError` where no recorded trajectory has an outcome. Args: `why`, the reason to need one."""
    recorded = [each for each in work.offline() if each.steps]
    if recorded and not any(each.has_outcome for each in recorded):
        raise ConfigurationError(
            f"none of {len(recorded)} traces has a reward, and {why}: give --rewards (`dreamgym import`), reward= "
            "(load_traces), or a `reward` in each row"
        )


def _record_data(work: Workspace) -> None:
    """Record the numbers of `DATA`: later traces and outcomes then change no held-out task."""
    offline = work.offline(reorder=True)
    work.keep_record(DATA, {"trajectories": len(offline), "held_out": held_out_tasks(offline)})


def train_user_model(work: Workspace, model: "StartModel", goals: BaseChatModel | str | None) -> None:
    """Train `models/user` to reply as recorded users did, given goal and history. Args: as of `Experiment.train_user`."""
    written = run_lasting(write_goals(work.replay_buffer, goals))
    if written.failed:
        work.say(f"{len(written.failed)} recorded users have no goal; the first: {next(iter(written.failed.values()))}")
    user = work.model_user() or ModelUser(None)
    if work.seconds("experience") is None:
        _record_data(work)
    # held-out conversations are left for the gate
    train, held_out = (list(filter(has_user_turns, episodes)) for episodes in work.experience_data())
    if not train:
        raise ConfigurationError(
            f"{work.out} has no recorded conversation of the split 'train' in which a user replied: give a replay buffer with "
            "such traces, or user=ModelUser(...) with a hosted model"
        )
    start = start_of(work, model, f"{USER}-start")
    rows, held_out_rows = (tokenized(start, [user.conversation(each) for each in episodes]) for episodes in (train, held_out))
    fine_tune(work, "user", start, USER, rows, steps=work.settings.user_steps, held_out=held_out_rows[: MAX_HELD_OUT // 4])


def _warn_of_cut_answers(work: Workspace, rows: Sequence[TrainingRow]) -> None:
    """Report recorded answers with more tokens than the experience model may write."""
    from dreamgym_lg.integrations.trl.rows import reply_lengths

    lengths, most = [length for row in rows for length in reply_lengths(row)], work.settings.experience_tokens
    if cut := sum(length > most for length in lengths):
        work.say(
            f"{cut} of {len(lengths)} answers to learn have more than experience_tokens={most} tokens and will be cut off in "
            f"the dream: raise experience_tokens (Settings) to {max(lengths)} or more"
        )


def _to_annotate(annotator: object) -> Annotate | None:
    model = load_chat_model(annotator) if isinstance(annotator, str) else annotator
    if isinstance(model, BaseChatModel):
        return partial(annotate, model=model)
    if model is None or callable(model):
        return model
    raise ConfigurationError(
        f"annotator={annotator!r}: give a chat model, its name, or partial(annotate, model=..., hosted=...)"
    )


def _annotate(work: Workspace, replay_buffer: ReplayBuffer, write_reasoning: Annotate) -> None:
    """Let a chat model write missing reasoning. Failures are reported; a rule writes theirs."""
    source: Source | None = "offline" if replay_buffer is work.replay_buffer else None
    done = run_lasting(write_reasoning(replay_buffer, source=source))
    if done.failed:
        cause = next(iter(done.failed.values()))
        work.say(f"{len(done.failed)} episodes could not be annotated and have their reasoning by rules; the first: {cause}")


def _edited(work: Workspace, train: Sequence[Trajectory], write_reasoning: Annotate | None) -> list[Trajectory]:
    """Edit successes into failures. They are annotated in a buffer of their own, from which nothing is retrieved."""
    successes = [trajectory for trajectory in train if trajectory.success and is_tool_task(trajectory.task)]
    edited = edited_successes(successes, writes=work.world.writing_tools(work.replay_buffer), seed=work.settings.seed)
    if not edited or write_reasoning is None:
        return edited
    with ReplayBuffer(work.out / "edited.db") as buffer:
        buffer.extend(edited)
        _annotate(work, buffer, write_reasoning)
        return list(buffer.trajectories())


def _rows(
    work: Workspace, start: str | Path, recorded: Sequence[Trajectory], edited: Sequence[Trajectory] = ()
) -> list[TrainingRow]:
    """Training rows: as many answers as verdicts, as many verdicts of success as of failure.

    Of an edited episode only the verdict is learned: its tools' answers are made up.
    """
    model = as_trained(None, work.settings, work.replay_buffer, "")
    dream = work.world.create_dream(model)
    model.retrieve(recorded)
    responses = [model.training_conversation(each) for each in recorded]
    verdicts: dict[bool, list[list[BaseMessage]]] = {True: [], False: []}
    for each in (*recorded, *edited):
        verdicts[each.success] += run_lasting(judge_conversations(dream, each))
    answers, *judged = (tokenized(start, conversations) for conversations in (responses, *verdicts.values()))
    return _balanced(answers, _balanced(*judged))


def _balanced(*groups: list[TrainingRow]) -> list[TrainingRow]:
    """All rows, those of the smaller group repeated up to the size of the other."""
    most = max(map(len, groups))
    return [rows[number % len(rows)] for rows in groups if rows for number in range(most)]


def _check_judged(work: Workspace, train: Sequence[Trajectory], edited: Sequence[Trajectory]) -> None:
    """Raise `ConfigurationError` without a success. Warn of few episodes, or no failure."""
    judged = [trajectory for trajectory in train if ends_with_message(trajectory)]
    successes = sum(trajectory.success for trajectory in judged)
    if not successes:
        raise ConfigurationError(
            f"none of the {len(judged)} recorded episodes that end in a message is a success: an experience model cannot learn "
            "what to reward; import traces with their outcome (`success` or `reward` in each row)"
        )
    if len(train) < FEW_EPISODES:
        work.say(
            f"{len(train)} recorded episodes are few for an experience model, which learns the tools' answers from them: "
            "import more, some for each kind of task"
        )
    if successes == len(judged) and not edited:
        work.say(
            f"all {successes} recorded episodes are successes, and none could be edited into a failure: the experience model "
            "will reward every message; import failed traces too, or name the tools that change the world (writes=[...])"
        )


def tokenizer_of(start: str | Path) -> Any:
    """The tokenizer of the weights that a training begins with."""
    from dreamgym_lg.integrations.transformers.loading import load_tokenizer

    return load_tokenizer(start)


def tokenized(start: str | Path, conversations: Sequence[Sequence[BaseMessage]]) -> list[TrainingRow]:
    """Training rows of conversations, by the tokenizer of `start`; empty ones are left out."""
    from dreamgym_lg.integrations.trl.rows import tokenize

    return tokenize(tokenizer_of(start), list(filter(None, conversations))) if conversations else []


def start_of(work: Workspace, model: "StartModel", name: str = "start") -> str | Path:
    """The folder or hub name of the weights that a training begins with. Writes those of an object to `models/NAME`."""
    if model is None or isinstance(model, str | Path):
        return model or work.settings.model
    sampling = {"temperature": 1.0, "max_new_tokens": work.settings.policy_tokens}
    model.model_copy(update=sampling).save(work.models / name)
    return work.models / name


def checkpoints_of(work: Workspace, to: str, start: str | Path, steps: int, segments: Iterable[Segment]) -> Path:
    """The folder of a training's checkpoints. Checkpoints of other weights, steps or rows are removed."""
    folder, tokens = work.out / "checkpoints" / to, [list(segment.token_ids) for segment in segments]
    digest = sha256(json.dumps([str(start), steps, tokens]).encode()).hexdigest()
    if not (folder / "rows").exists() or (folder / "rows").read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        write_whole(folder / "rows", digest)
    return folder


def fine_tune(
    work: Workspace,
    label: str,
    start: str | Path,
    to: str,
    rows: Sequence[TrainingRow],
    *,
    steps: int,
    **options: Any,
) -> None:
    """Fine-tune the model at `start` and write `models/TO`. After a crash it resumes from `checkpoints/TO`.

    Args: `options`, of `sft.fine_tune`.
    """
    work.progress(label, 0, steps)  # loading and the first step take long
    from dreamgym_lg.integrations.trl import sft

    s, checkpoints = work.settings, checkpoints_of(work, to, start, steps, [row.segment for row in rows])
    sft.fine_tune(
        start,
        work.models / to,
        rows,
        steps=steps,
        seed=s.seed,
        checkpoints=checkpoints,
        on_step=lambda step, loss: work.progress(f"{label} (loss {loss:.2f})", step, steps),
        lora=s.lora,
        **{"batch_size": s.batch_size, "learning_rate": s.supervised_learning_rate, **options},
    )
