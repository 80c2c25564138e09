"""What decides a demo's result: one frozen `Settings` per game, found by the measurements of closed_loop.md and ours."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dreamgym_lg.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Written to the output folder and held fixed there."""

    game: str = "peckingorder"
    seed: int = 0
    worlds: int = 2500
    """Seeds tried; different first observations among them become tasks, split by their hash."""
    episodes: Mapping[str, int]
    """Offline trajectories of each kind of scripted policy."""
    check: Literal["names", "state"] = "names"
    """How much is known of an action's validity before the experience model is asked."""
    demonstrations: int = 60
    """Demonstrations the base policy is fine-tuned on."""
    retrieved: int = 1
    """Real transitions retrieved for every step of the dream: k of the paper's top-k."""
    experience_steps: int = 400
    base_steps: int = 300
    """At most; the base policy is done as soon as its dreamed episodes earn `base_reward` on average."""
    base_reward: float = 0.25
    batch_size: int = 16
    iterations: int = 40
    num_tasks: int = 8
    num_generations: int = 8
    max_steps: int = 10
    learning_rate: float = 3e-4
    beta: float = 0.02
    synthetic_share: float = 0.25
    evaluate_every: int = 10
    evaluate_tasks: int = 32
    """Validation worlds of each evaluation during training."""
    proof_tasks: int = 120
    """Held-out worlds of the proof."""
    transfer_tasks: int = 40
    """Worlds of the game's own test fold, whose objects occur nowhere in training: a row of its own."""
    refresh_every: int = 15
    refresh_episodes: int = 0
    """Real episodes of the current policy shown to the experience model at each refresh; 0 spends no real step."""
    refresh_steps: int = 50


EPISODES = {"demonstration": 1500, "noisy": 800, "random": 700, "malformed": 500, "fluent_wrong": 5500, "mixture": 1000}

GAMES = {
    "peckingorder": Settings(episodes=EPISODES),
    "twc": Settings(game="twc", episodes=EPISODES, worlds=5000, check="state"),
}


def settings_for(game: str, *, quick: bool = False, **overrides: Any) -> Settings:
    """The recipe of a game; `quick` is two or three minutes of it, enough to see every part work and not to prove a gain."""
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    settings = GAMES[game]
    if quick:
        settings = replace(
            settings,
            worlds=400,
            episodes={kind: n // 8 for kind, n in settings.episodes.items()},
            batch_size=8,
            experience_steps=100,
            base_steps=20,
            iterations=3,
            evaluate_every=3,
            evaluate_tasks=8,
            proof_tasks=16,
            transfer_tasks=8,
            refresh_every=2,
            refresh_episodes=min(settings.refresh_episodes, 8),
            refresh_steps=4,
        )
    return replace(settings, **overrides)
