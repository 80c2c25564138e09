"""The proof of a run: the same policies on the same worlds, real and dreamed, with every real step counted."""

import json
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.fidelity import judge, summarise
from dreamgym_lg.rollout import real_steps
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.experiment import Demo

MODES = {"greedy": 0.0, "sampled": 1.0}
"""How the policy is evaluated, and at which temperature."""


def compare(demo: "Demo", policy: Any, experience: ExperienceModel, iteration: int) -> dict[str, Any]:
    """The policy on validation worlds, real and dreamed, and the experience model's verdict on its real actions."""
    tasks = demo.tasks("validation")[: demo.settings.evaluate_tasks]
    real = demo.play("validate/real", policy, tasks, iteration=iteration)
    dreamed = demo.play("validate/dream", policy, tasks, iteration=iteration, experience=experience)
    verdicts = run_lasting(judge(experience, real, check_action=demo.check_action))
    figures: dict[str, Any] = {
        "eval_real_successes": sum(trajectory.success for trajectory in real),
        "eval_real_episodes": len(real),
        "eval_dream_successes": sum(trajectory.success for trajectory in dreamed),
        "eval_dream_episodes": len(dreamed),
        "eval_invalid_recall": verdicts.invalid_recall,
        "eval_invalid_count": verdicts.invalid,
        "eval_reward_errors": verdicts.reward_errors / max(verdicts.valid + verdicts.invalid, 1),
    }
    gap = figures["eval_dream_successes"] / len(dreamed) - figures["eval_real_successes"] / len(real)
    demo.say(
        f"after {iteration} iterations: real {figures['eval_real_successes']}/{len(real)}, "
        f"dream {figures['eval_dream_successes']}/{len(dreamed)}, gap {gap:+.2f}; the experience model "
        f"recognised {verdicts.invalid_recognised} of {verdicts.invalid} invalid actions and gave "
        f"{figures['eval_reward_errors']:.1%} wrong rewards"
    )
    return figures


def prove(demo: "Demo") -> dict[str, Any]:
    """Base against trained policy on held-out worlds, real and dreamed, and on the game's own unseen objects.

    Writes `result.json`. Raises `ConfigurationError` if there is no trained policy yet.
    """
    if not (demo.models / "trained").exists():
        raise ConfigurationError(f"{demo.out} holds no trained policy: run `dreamgym train` with the same options first")
    figures: dict[str, Any] = {"real": {}, "dream": {}, "transfer": {}}
    experience = demo.experience()
    with demo.stage("evaluate"):
        for number, (name, mode) in enumerate(product(("base", "trained"), MODES), start=1):
            policy = demo.policy(name, MODES[mode])
            for row, episodes in _panels(demo, name, mode, policy, experience).items():
                figures[row].setdefault(name, {})[mode] = summarise(episodes)
                if row == "real":
                    verdicts = run_lasting(judge(experience, episodes, check_action=demo.check_action))
                    asked = {"invalid_recall": verdicts.invalid_recall, "invalid_asked": verdicts.invalid}
                    figures[row][name][mode] |= asked
            demo.progress("prove in the real environment", number, 2 * len(MODES))
    result = {
        "game": demo.settings.game,
        "seed": demo.settings.seed,
        "version": version("dreamgym-lg"),
        "iterations": demo.settings.iterations,
        **figures,
        "real_steps": count_real_steps(demo),
        "seconds": {name: demo.seconds(name) for name in ("collect", "experience", "base", "train", "evaluate")},
        "settings": asdict(demo.settings),
    }
    (demo.out / "result.json").write_text(json.dumps(result, indent=2))
    return result


def _panels(
    demo: "Demo", name: str, mode: str, policy: Any, experience: ExperienceModel
) -> dict[str, list[Trajectory]]:
    held_out, unseen = demo.tasks("test")[: demo.settings.proof_tasks], demo.tasks("test", fold="test")
    return {
        "real": demo.play(f"proof/real/{name}/{mode}", policy, held_out),
        "dream": demo.play(f"proof/dream/{name}/{mode}", policy, held_out, experience=experience),
        "transfer": demo.play(f"proof/transfer/{name}/{mode}", policy, unseen),
    }


def count_real_steps(demo: "Demo") -> dict[str, int]:
    """All real steps of the folder, counted from its records, by what they were spent on."""
    counted = {"offline": 0, "refresh": 0, "evaluation": 0}
    for source in ("offline", "real"):
        for trajectory in demo.replay_buffer.trajectories(source=source):
            kind = trajectory.run if trajectory.run in counted else "evaluation"
            counted[kind] += real_steps([trajectory], demo.check_action)
    return counted


def shown_episodes(demo: "Demo") -> list[Trajectory]:
    """Some dreamed episodes of the first and last iterations, and the trained policy's first real ones."""
    iterations = (0, demo.settings.iterations - 1)
    dreamed = [list(demo.replay_buffer.trajectories(run="train", iteration=i, limit=3)) for i in iterations]
    return [*dreamed[0], *dreamed[1], *demo.replay_buffer.trajectories(run="proof/real/trained/sampled", limit=3)]
