"""The supervised stages of an experiment: the experience model and the base policy."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from dreamgym_lg.curriculum.demonstrations import told_by_calls
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.annotate import Annotate, annotate
from dreamgym_lg.experience.chat_models import load_chat_model
from dreamgym_lg.experience.notes import in_noted_world, thorough
from dreamgym_lg.experience.prompt_formats import is_tool_task
from dreamgym_lg.experience.similar_successes import ends_in_answer
from dreamgym_lg.experience.training_data import notes_conversation, to_conversation
from dreamgym_lg.experiment.evaluation import DEMONSTRATIONS, BestPolicy
from dreamgym_lg.experiment.workspace import DATA, REFRESH, Workspace
from dreamgym_lg.experiment.world import Messages
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played
from dreamgym_lg.types import Source, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.trl.rows import TokenizedConversation

    StartModel = LocalChatModel | str | Path | None
    """A local model, its path or hub name; None for the small base (`SMALL_BASE`)."""

POLICY_OPTIONS: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "dataloader_drop_last": True}
"""Of the base policy's training: its end is not known when it begins, and a last batch of few rows would weigh as much."""
FIRST_LINES_WEIGHT = 4.0
"""The loss weight of the experience model's verdict, reward and status."""
CHECKED, PATIENCE = 25, 4
"""The base policy is evaluated every so many steps, and its training ends after so many evaluations without a better one."""
SLOWER = 4.0
"""What the learning rate is divided by where weights that were trained on such data are trained further."""
FEW = 20
"""Recorded episodes below which a warning says that there are few."""
NO_NOTES_EVERY = 4
"""One recorded episode in so many is shown without its notes."""
WATCHED = 64
"""Held-out episodes whose loss ends the experience model's training."""


def train_experience_model(
    work: Workspace, model: "StartModel" = None, annotator: BaseChatModel | Annotate | str | None = None
) -> None:
    """Train `models/experience-0` on what it should have answered in the offline trajectories.

    Args: `model`, whose weights it begins with; `annotator`, writes the reasoning of steps that have none, in place of rules.
    """
    s, annotated = work.settings, _annotated_by(annotator)
    if annotated is not None:
        _annotate(work, work.replay_buffer, annotated)
    if not (offline := work.offline()):
        raise ConfigurationError(
            f"{work.out} has no recorded trajectory of the split 'train' to learn from: call collect() first; for a DreamGym, "
            "give a replay buffer with traces (load_traces, `dreamgym import`)"
        )
    work.replay_buffer.record_metrics(work.run_name(DATA), 0, {"trajectories": len(offline)})
    shown, held_out = (_as_dreamed(work, each) for each in work.experience_data())
    edited = _edited(work, shown, annotated)
    start, notes = _start(work, model), _notes_conversations(work, shown)
    watched: Sequence[TokenizedConversation] = ()
    if any(_is_judged(trajectory) for trajectory in shown):
        rows = [*_judging_rows(work, start, shown, edited), *_evenly_weighed(_tokenized(start, notes))]
        watched = _tokenized(start, _conversations(work, held_out[:WATCHED]))
    else:
        rows = _tokenized(start, [*_conversations(work, [*shown, *edited]), *notes])
    _say_cut(work, rows)
    _fine_tune(
        work,
        "experience model",
        start,
        "experience-0",
        rows,
        steps=s.experience_steps,
        first_lines_weight=FIRST_LINES_WEIGHT,
        held_out=watched,
    )


def _say_cut(work: Workspace, rows: "Sequence[TokenizedConversation]") -> None:
    """Say how many recorded answers have more tokens than the experience model may write: the dream would cut them off."""
    from dreamgym_lg.integrations.trl.rows import reply_lengths

    lengths, most = [length for row in rows for length in reply_lengths(row)], work.settings.experience_tokens
    if cut := sum(length > most for length in lengths):
        work.say(
            f"{cut} of {len(lengths)} answers to learn have more than experience_tokens={most} tokens and will be cut off in "
            f"the dream: raise experience_tokens (Settings) to {max(lengths)} or more"
        )


def _annotated_by(annotator: object) -> Annotate | None:
    """What writes the reasoning, from what a user calls it."""
    model = load_chat_model(annotator) if isinstance(annotator, str) else annotator
    if isinstance(model, BaseChatModel):
        return partial(annotate, model=model)
    if model is None or callable(model):
        return model
    raise ConfigurationError(
        f"annotator={annotator!r}: give a chat model, its name, or partial(annotate, model=..., hosted=..., batch=...)"
    )


def _annotate(work: Workspace, replay_buffer: ReplayBuffer, annotated: Annotate) -> None:
    """Let a chat model write the reasoning of all steps that have none; what fails is said, and left to rules."""
    source: Source | None = "offline" if replay_buffer is work.replay_buffer else None
    done = run_lasting(annotated(replay_buffer, source=source))
    if done.failed:
        cause = next(iter(done.failed.values()))
        work.say(f"{len(done.failed)} episodes could not be annotated and have their reasoning by rules; the first: {cause}")


def _edited(work: Workspace, shown: Sequence[Trajectory], annotated: Annotate | None) -> list[Trajectory]:
    """Successes made wrong, in a file of their own: they are no data of the real world, and nothing retrieves them."""
    successes = [trajectory for trajectory in shown if trajectory.success]
    writes = work.world.writing_tools(work.replay_buffer)
    edited = list(work.world.edited_successes(successes, writes=writes, seed=work.settings.seed))
    if not edited or annotated is None:
        return edited
    with ReplayBuffer(work.out / "edited.db") as buffer:
        buffer.extend(edited)
        _annotate(work, buffer, annotated)
        return list(buffer.trajectories())


def _judging_rows(
    work: Workspace, start: str | Path, shown: Sequence[Trajectory], edited: Sequence[Trajectory]
) -> "list[TokenizedConversation]":
    """Rows in which final answers that end in success are as frequent as those that do not.

    Of an edited episode only the verdict is learned: what its tools answered is made up.
    """
    from dreamgym_lg.integrations.trl.rows import only_last_reply

    _check_judged(work, shown, edited)

    def rows(trajectories: Sequence[Trajectory]) -> "list[TokenizedConversation]":
        return _tokenized(start, _conversations(work, trajectories))

    judged = [trajectory for trajectory in shown if _is_judged(trajectory)]
    paid = rows([trajectory for trajectory in judged if trajectory.success])
    unpaid = [*rows([trajectory for trajectory in judged if not trajectory.success]), *only_last_reply(rows(edited))]
    cut_short = rows([trajectory for trajectory in shown if not _is_judged(trajectory)])
    few, many = sorted((paid, unpaid), key=len)
    repeated = [few[number % len(few)] for number in range(len(many))] if few else []
    return [*repeated, *many, *cut_short]


def _is_judged(trajectory: Trajectory) -> bool:
    """Whether it is a tool agent's episode that ends with the answer it is judged by."""
    return is_tool_task(trajectory.task) and ends_in_answer(trajectory)


def _check_judged(work: Workspace, shown: Sequence[Trajectory], edited: Sequence[Trajectory]) -> None:
    """Say what is missing for a model that has to tell success from failure. Raises `ConfigurationError` without a success."""
    judged = [trajectory for trajectory in shown if _is_judged(trajectory)]
    paid = sum(trajectory.success for trajectory in judged)
    if not paid:
        raise ConfigurationError(
            f"none of the {len(judged)} recorded episodes that end in an answer is a success: an experience model cannot learn "
            "what to pay; import traces with their outcome (`success` or `reward` in each row)"
        )
    if len(shown) < FEW:
        work.say(
            f"{len(shown)} recorded episodes are few for an experience model, which learns the tools' answers from them: "
            "import more, some for each kind of task"
        )
    if paid == len(judged) and not edited:
        work.say(
            f"all {paid} recorded episodes are successes, and none could be edited into a failure: the experience model will "
            "pay for every answer; import failed traces too, or name the tools that change the world (writes=[...])"
        )


def refresh_experience_model(work: Workspace, name: str, iteration: int) -> None:
    """Train the newest experience model further, as `name`: half on the policy's real episodes, half on offline data."""
    s = work.settings
    rng, half = Random(f"{s.seed}/mix/{iteration}"), s.batch_size * s.refresh_steps // 2
    played = list(work.replay_buffer.trajectories(run=work.run_name(REFRESH), errors=False))
    kept = work.replay_buffer.sample(half, rng=rng, source="offline")
    old, new = _as_dreamed(work, kept), _as_dreamed(work, played)
    start = work.models / work.newest_experience()
    notes = _evenly_weighed(_tokenized(start, _notes_conversations(work, [*old, *new])))
    _fine_tune(
        work,
        "refresh",
        start,
        name,
        [*_tokenized(start, [*_conversations(work, old), *rng.choices(_conversations(work, new), k=half)]), *notes],
        steps=s.refresh_steps,
        slower=SLOWER,
        first_lines_weight=FIRST_LINES_WEIGHT,
    )


def train_base_policy(work: Workspace, model: "StartModel" = None) -> None:
    """Train `models/base` on every recorded success until its validation success stops rising; the best one is kept."""
    shown, start, s = _successes(work), _start(work, model), work.settings
    rows = work.world.policy_rows(shown, _tokenizer(start), max_new_tokens=s.policy_tokens)
    for left in work.models.glob("base-*"):  # of an attempt that was killed
        shutil.rmtree(left)
    best, until = BestPolicy(work, f"base-{uuid4().hex[:8]}"), None
    if untold := _no_evaluation(work):
        work.say(f"{untold}: the base policy is trained for all {s.base_steps} steps")
    else:
        _check_evaluation(work)
        until = partial(_stopped_rising, work, best)
    _fine_tune(work, "base policy", start, "base-last", rows, steps=s.base_steps, until=until, **POLICY_OPTIONS)
    last = work.models / "base-last"
    shutil.rmtree(work.models / "base", ignore_errors=True)
    (best.folder if best.folder.exists() else last).rename(work.models / "base")
    shutil.rmtree(last, ignore_errors=True)


def imitate_demonstrations(work: Workspace, policy: "LocalChatModel") -> "LocalChatModel":
    """The policy after it has imitated `Settings.synthetic_demonstrations`, stored as `models/imitated`; itself without any."""
    from dreamgym_lg.integrations.trl.options import default_rate
    from dreamgym_lg.integrations.trl.sft import save_model, train_sft

    s, number, label = work.settings, work.settings.synthetic_demonstrations, "put demonstrations together"
    options: dict[str, Any] = {"number": number, "seed": s.seed, "progress": lambda done: work.progress(label, done, number)}
    made = work.world.demonstrations(work.tasks("train"), work.replay_buffer, **options)
    work.progress(label, len(made), len(made))
    if not made:
        work.say("training begins without demonstrations: no recorded success could be carried over: requests need ids, names")
        return policy
    recorded = _successes(work)
    rows = work.world.policy_rows([*made, *recorded], policy.tokenizer, max_new_tokens=s.policy_tokens)
    steps = -(-len(rows) // s.batch_size)
    train_sft(
        policy.model,
        policy.tokenizer,
        rows,
        steps=steps,
        batch_size=s.batch_size,
        learning_rate=(s.supervised_learning_rate or default_rate(policy.model, small=7e-4, large=1e-5)) / SLOWER,
        seed=s.seed,
        on_step=lambda step, loss: work.progress(f"demonstrations (loss {loss:.2f})", step, steps),
        **POLICY_OPTIONS,
    )
    save_model(policy.model, policy.tokenizer, work.models / "imitated")
    work.replay_buffer.record_metrics(work.run_name(DEMONSTRATIONS), 0, {"generated": len(made), "recorded": len(recorded)})
    more = f" (of {number}: there are no more)" if len(made) < number else ""
    said = f"the policy has imitated {len(made)} generated demonstrations{more} beside {len(recorded)} recorded successes"
    work.say(f"{said}; by calls: {told_by_calls(made, recorded)}")
    return work.policy("imitated")


def _no_evaluation(work: Workspace) -> str | None:
    """Why no success says when the base policy is done; None if it does."""
    if not work.validation_tasks():
        return "there is no task of the split 'validation' (dataclasses.replace(task, split='validation') gives it one)"
    if work.settings.real_budget == 0 and work.settings.references_only:
        return "real_budget=0 lets no validation task be played on real tools, and under references_only no dream judges one"
    return None


def _check_evaluation(work: Workspace) -> None:
    """Raise `ConfigurationError` where the base policy cannot be evaluated in the dream, before it is trained."""
    if work.settings.real_budget == 0 and work.world.asks_experience and work.experience(own_process=False).model is None:
        raise ConfigurationError(
            f"real_budget=0 evaluates the base policy in the dream, and {work.out} holds no experience model: call "
            "train_experience() first, or give real_budget"
        )


def _stopped_rising(work: Workspace, best: BestPolicy, model: Any, tokenizer: Any, step: int) -> bool:
    """Whether the base policy's validation success has stopped rising; the best one is kept on the way.

    It is real success unless `real_budget` is 0, else that in the dream.
    """
    if step % CHECKED and step != work.settings.base_steps:
        return False
    policy = _policy(work, model, tokenizer)
    kind, dream = ("real", None) if work.settings.real_budget != 0 else ("dream", work.experience())
    name = f"validate/{best.name}" if dream is None else f"validate/{best.name}/dream"
    episodes = check_played(work.play(name, policy, work.validation_tasks(), iteration=step, experience=dream))
    successes = sum(trajectory.success for trajectory in episodes)
    best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
    work.say(f"base policy after {step} steps: {kind} {successes}/{len(episodes)}")
    done = step - best.risen_at >= PATIENCE * CHECKED
    if step == work.settings.base_steps and not done:
        work.say(f"the base policy's success was still rising when its {step} steps were over: raise base_steps (Settings)")
    return done


def _policy(work: Workspace, model: Any, tokenizer: Any) -> Any:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    return LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=work.settings.policy_tokens)


def _successes(work: Workspace) -> list[Trajectory]:
    """Offline successes without an invalid action. Raises `ConfigurationError` if there is none."""
    offline = work.offline()
    shown = [trajectory for trajectory in offline if trajectory.success and not trajectory.invalid_actions]
    if not shown:
        raise ConfigurationError(
            f"no offline trajectory of {len(offline)} is a success without an invalid action: there is nothing to fine-tune a "
            "base policy on; collect or import some, or give train() a policy that is good enough already"
        )
    return shown


def _as_dreamed(work: Workspace, recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """Recorded episodes as a dream would meet them, in the world of their notes in hindsight where the model takes notes.

    Every fourth is left without: a policy also looks up what no notes say, and few notes must not tell failures apart.
    """
    dreamed = list(work.world.as_dreamed(recorded))
    if not work.experience("").notes:
        return dreamed
    writes = work.world.writing_tools(work.replay_buffer)
    return [in_noted_world(each, writes) if number % NO_NOTES_EVERY else each for number, each in enumerate(dreamed)]


def _notes_conversations(work: Workspace, trajectories: Sequence[Trajectory]) -> list[Messages]:
    """In which the experience model should have written down what these episodes looked up (`thorough`)."""
    experience = work.experience("")
    if not experience.notes:
        return []
    chosen = thorough(trajectories, work.world.writing_tools(work.replay_buffer))
    return [_messages(notes_conversation(experience, each)) for each in chosen]


def _conversations(work: Workspace, trajectories: Sequence[Trajectory]) -> list[Messages]:
    """What the experience model should have been asked and have answered in these episodes, a conversation each."""
    asked = work.experience("")
    asked.retrieve(trajectories)
    found = (to_conversation(asked, trajectory, work.world.check_action) for trajectory in trajectories)
    return [_messages(messages) for messages in found if messages]


def _messages(messages: Sequence[BaseMessage]) -> Messages:
    return [{"role": {"human": "user", "ai": "assistant"}.get(m.type, m.type), "content": m.text} for m in messages]


def _tokenizer(start: str | Path) -> Any:
    from dreamgym_lg.integrations.transformers.loading import load_tokenizer

    return load_tokenizer(start)


def _evenly_weighed(rows: "Sequence[TokenizedConversation]") -> "list[TokenizedConversation]":
    """The rows without `FIRST_LINES_WEIGHT`: the first lines of notes are no verdict."""
    return [{**row, "weights": [1.0] * len(row["input_ids"])} for row in rows]


def _tokenized(start: str | Path, conversations: Sequence[Messages]) -> "list[TokenizedConversation]":
    from dreamgym_lg.integrations.trl.rows import tokenize

    return tokenize(_tokenizer(start), conversations) if conversations else []


def _start(work: Workspace, model: "StartModel") -> str | Path:
    """The folder or hub name of the weights that a training begins with."""
    from dreamgym_lg.integrations.transformers.small_base import SMALL_BASE
    from dreamgym_lg.integrations.trl.sft import save_model

    if model is None or isinstance(model, str | Path):
        return model or SMALL_BASE
    if model.model is None:
        raise ConfigurationError("the model has a process of its own, which trains nothing: load it without own_process")
    save_model(model.model, model.tokenizer, work.models / "start")
    return work.models / "start"


def _fine_tune(
    work: Workspace,
    label: str,
    start: str | Path,
    to: str,
    rows: "Sequence[TokenizedConversation]",
    *,
    steps: int,
    **options: Any,
) -> None:
    """Fine-tune the model at `start` and write `models/TO`. Args: `options`, of `sft.fine_tune`."""
    from dreamgym_lg.integrations.trl.sft import fine_tune

    fine_tune(
        start,
        work.models / to,
        rows,
        steps=steps,
        seed=work.settings.seed,
        on_step=lambda step, loss: work.progress(f"{label} (loss {loss:.2f})", step, steps),
        **{"batch_size": work.settings.batch_size, "learning_rate": work.settings.supervised_learning_rate, **options},
    )
