"""The supervised stages of an experiment: the experience model, the base policy, and the baseline without any dream."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import to_conversation
from dreamgym_lg.experiment.evaluation import BestPolicy
from dreamgym_lg.experiment.workspace import DATA, REFRESH, Workspace
from dreamgym_lg.experiment.world import Messages
from dreamgym_lg.rollout import check_played, is_missing
from dreamgym_lg.types import Trajectory

POLICY_OPTIONS = {"learning_rate": 7e-4, "lr_scheduler_type": "constant_with_warmup"}
"""Of base policy and baseline alike: what tells them apart is how long they are trained."""
CHECKED, PATIENCE = 50, 3
"""The baseline is evaluated every so many steps, and ends after so many evaluations without a better one."""


def train_experience_model(work: Workspace) -> None:
    """A small model from scratch, `models/experience-0`, on what it should have answered in the offline trajectories."""
    from dreamgym_lg.integrations.transformers.tiny_models import create_model, create_tokenizer
    from dreamgym_lg.integrations.trl.sft import save_model

    s, offline = work.settings, work.offline()
    work.replay_buffer.record_metrics(work.run_name(DATA), 0, {"trajectories": len(offline)})
    conversations = _experience_data(work, offline[: s.batch_size * s.experience_steps])
    # with the policy's own texts among them: a word that begins a message is another token than one after a space
    acted = [work.world.conversation(trajectory) for trajectory in offline]
    tokenizer = create_tokenizer(m["content"] for conversation in [*conversations, *acted] for m in conversation)
    save_model(create_model(tokenizer, max_tokens=s.context_tokens, seed=s.seed), tokenizer, work.models / "scratch")
    _fine_tune(
        work,
        "experience model",
        "scratch",
        "experience-0",
        conversations,
        steps=s.experience_steps,
        learning_rate=2e-3,
        first_lines_weight=4.0,
    )


def refresh_experience_model(work: Workspace, name: str, iteration: int) -> None:
    """Train the newest experience model further, as `name`: half on the policy's real episodes, half on offline data."""
    s = work.settings
    rng, half = Random(f"{s.seed}/mix/{iteration}"), s.batch_size * s.refresh_steps // 2
    new = _experience_data(work, list(work.replay_buffer.trajectories(run=work.run_name(REFRESH), errors=False)))
    old = _experience_data(work, work.replay_buffer.sample(half, rng=rng, source="offline"))
    _fine_tune(
        work,
        "refresh",
        work.newest_experience(),
        name,
        [*old, *rng.choices(new, k=half)],
        steps=s.refresh_steps,
        learning_rate=5e-4,
        first_lines_weight=4.0,
    )


def train_base_policy(work: Workspace) -> None:
    """The base policy, from the experience model's weights, until its dreamed episodes earn something."""
    steps = work.settings.base_steps
    until = partial(_earns_something, work, work.experience())
    shown = _demonstrations(work, steps)
    _fine_tune(work, "base policy", "experience-0", "base", shown, steps=steps, until=until, **POLICY_OPTIONS)


def train_baseline(work: Workspace) -> None:
    """The baseline: start, demonstrations and optimiser of the base policy, until real validation success stops rising."""
    steps, until = work.settings.supervised_steps, partial(_stopped_rising, work)
    shown = _demonstrations(work, steps)
    _fine_tune(
        work, "supervised baseline", "experience-0", "supervised-last", shown, steps=steps, until=until, **POLICY_OPTIONS
    )


def _earns_something(work: Workspace, experience: ExperienceModel, model: Any, tokenizer: Any, step: int) -> bool:
    """Whether the base policy is good enough to be improved: groups that never earn anything teach GRPO nothing.

    Asked in the dream, so that it spends no real step; a loss does not tell, for copying comes late and suddenly.
    """
    if step % 10:
        return False
    policy = _policy(work, model, tokenizer)
    episodes = work.play("base/dream", policy, work.tasks("train")[:64], experience=experience, iteration=step)
    check_played([episode for episode in episodes if is_missing(episode)])
    if enough := sum(t.reward for t in episodes) >= work.settings.base_reward * len(episodes):
        work.progress("base policy (it earns enough)", step, step)
    return enough


def _stopped_rising(work: Workspace, model: Any, tokenizer: Any, step: int) -> bool:
    """Whether the baseline's real validation success has stopped rising; the best one is kept on the way."""
    if step % CHECKED and step != work.settings.supervised_steps:
        return False
    best, policy = BestPolicy(work, "supervised"), _policy(work, model, tokenizer)
    episodes = check_played(work.play("validate/supervised", policy, work.validation_tasks(), iteration=step))
    successes = sum(trajectory.success for trajectory in episodes)
    best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
    work.say(f"supervised for {step} steps: real {successes}/{len(episodes)}")
    return step - best.risen_at >= PATIENCE * CHECKED


def _policy(work: Workspace, model: Any, tokenizer: Any) -> Any:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    return LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=work.settings.policy_tokens)


def _demonstrations(work: Workspace, steps: int) -> list[Messages]:
    """Offline successes without an invalid action, repeated to last for so many optimiser steps."""
    s = work.settings
    shown = [t for t in work.offline() if t.success and not t.invalid_actions][: s.demonstrations]
    if not shown:
        raise ConfigurationError("no offline trajectory is a success: there is nothing to fine-tune a base policy on")
    return [work.world.conversation(t) for t in shown] * -(-s.batch_size * steps // len(shown))


def _experience_data(work: Workspace, trajectories: Sequence[Trajectory]) -> list[Messages]:
    """What the experience model should have been asked and have answered in these episodes, a conversation each."""
    asked = work.experience("")
    asked.retrieve(trajectories)
    found = (to_conversation(asked, trajectory, work.world.check_action) for trajectory in trajectories)
    roles = {"human": "user", "ai": "assistant"}
    return [[{"role": roles.get(m.type, m.type), "content": m.text} for m in messages] for messages in found if messages]


def _fine_tune(
    work: Workspace,
    label: str,
    start: str,
    to: str,
    conversations: Sequence[Messages],
    *,
    steps: int,
    until: Callable[[Any, Any, int], bool] | None = None,
    **options: Any,
) -> None:
    """Fine-tune `models/START` on conversations and write `models/TO`. Args: `options`, of `sft.fine_tune`."""
    from dreamgym_lg.integrations.trl.sft import fine_tune

    if not (work.models / start).exists():
        raise ConfigurationError(
            f"{work.out} has no local experience model, from whose weights this training starts: call train_experience(), "
            "or give policy= where experience_model= is a hosted model"
        )
    fine_tune(
        work.models / start,
        work.models / to,
        conversations,
        steps=steps,
        seed=work.settings.seed,
        batch_size=work.settings.batch_size,
        on_step=lambda step, loss: work.progress(f"{label} (loss {loss:.2f})", step, steps),
        until=until,
        **options,
    )
