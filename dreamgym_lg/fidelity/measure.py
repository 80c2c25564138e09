"""`measure`: all figures of a dream's report, from the trajectories of a replay buffer."""

from collections.abc import Iterable, Sequence
from random import Random

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.report import Fidelity, Group
from dreamgym_lg.fidelity.steps import measure_steps
from dreamgym_lg.hosted import name_of
from dreamgym_lg.progress import OnProgress, counter
from dreamgym_lg.types import Trajectory

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}


def measure(
    dream: Dream,
    trajectories: Iterable[Trajectory],
    *,
    limit: int | None = 100,
    seed: int = 0,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far a dream can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are put to it step by step, the traces of their own task left out. The same
    input gives the same result.

    Args:
        dream: The very object in which a policy is trained.
        limit: Episodes drawn of each source, at most; None for all.
        judgement: The same dream's verdicts (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.
        on_progress: Called with a label, the number done and the total.

    Raises whatever the model's server raises. An answer that cannot be read is a wrong answer, no error.
    """
    model = next((part for part in dream.responders if isinstance(part, Model)), Model(None))
    trajectories, groups = list(trajectories), list[Group]()
    real = [each for each in trajectories if each.source != "synthetic"]
    playable = [each for each in real if each.error is None and each.steps]
    for source in dict.fromkeys(each.source for each in playable):
        name, members = GROUPS[source], [each for each in playable if each.source == source]
        drawn = sorted(Random(f"{seed}/{name}").sample(range(len(members)), min(limit or len(members), len(members))))
        model.retrieve(episodes := [members[index] for index in drawn])
        figures = run_lasting(measure_steps(dream, episodes, on_episode=counter(on_progress, name, len(episodes))))
        rewarded = any(step.reward for each in episodes for step in each.steps)
        groups.append(Group(name=name, episodes=len(episodes), of=len(members), rewarded=rewarded, one_step=figures))
    return Fidelity(
        experience_model=name_of(model.model) if model.model is not None else "none",
        version=dream.version,
        retrieved=model.k,
        retrieves=model.retrieves,
        left_out=len(real) - len(playable),
        groups=tuple(groups),
        judgement=judgement,
        notes=tuple(notes),
    )
