"""The gate before training and the gap during it, on the traces of a small support desk."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg import (
    Dream,
    Environment,
    Episode,
    Experiment,
    Model,
    ModelJudge,
    ReplayBuffer,
    Settings,
    Step,
    Task,
    Trajectory,
    World,
)
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Answer, Goal, ModelUser, Verdict, Verify
from dreamgym_lg.errors import ConfigurationError, UntruthfulDream
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.evaluation import validate
from dreamgym_lg.experiment.training import create_curriculum
from dreamgym_lg.experiment.workspace import MIN_CASES, TRAIN
from dreamgym_lg.fidelity.judgement import LOOKUP, MISSED, Judgement, PartJudgement, ajudge
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.statistics import Rate, paired_interval, wilson
from dreamgym_lg.types import StepResult

ANSWER = render_answer("It is refunded.")


def task(number: int, split: Any = "train") -> Task:
    request = f"Refund order A-{number}."
    words = {"instruction": request, "observation": request}
    return Task(id=f"{split}-{number}", environment="desk", tools=["lookup", "refund"], split=split, **words)


def trace(number: int, *, refunds: bool = True, index: int = 0) -> Trajectory:
    order = {"order_id": f"A-{number}"}
    calls = [(render_call("lookup", order), '{"status": "delivered"}')]
    calls += [(render_call("refund", order), '{"done": true}')] if refunds else []
    seen, steps = f"Refund order A-{number}.", []
    for action, answer in [*calls, (ANSWER, "")]:
        end = action == ANSWER
        steps.append(
            Step(observation=seen, action=action, next_observation=answer, terminated=end, reward=float(end and refunds))
        )
        seen = answer
    return Trajectory(task=task(number), steps=steps, success=refunds, run="traces", rollout_index=index)


class Traces:
    """A judge that decides the outcome of these tasks."""

    name, version = "references", ""

    def __init__(self, judged: set[str]) -> None:
        self.judged = judged

    def decides(self, task: Task) -> bool:
        return task.id in self.judged

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        return None


class Desk(World):
    name = "desk"
    settings = Settings(real_budget=0, evaluate_every=1, iterations=4, evaluate_tasks=4)
    judged_by_traces: set[str] = set()

    def tasks(self, split: Any, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        return [task(number, split) for number in range(4)]

    def create_environment(self) -> Environment:
        return Refuses()

    def create_dream(self, model: Model) -> Dream:
        return Dream([model], judges=[Traces(self.judged_by_traces), ModelJudge(model)])

    def writing_tools(self, replay_buffer: ReplayBuffer) -> Sequence[str]:
        return ("refund",)


class Refuses(Environment):
    """A real desk that pays nothing."""

    def reset(self, task: Task) -> str:
        return task.instruction

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, True, False, {"success": False})


DELIVERED = 'valid, no progress yet\nreward 0, continues\n{"status": "delivered"}'


def action_of(messages: list[Any]) -> str:
    return str(messages[-1].text.rsplit("> ", 1)[1])


def rewards_all(messages: list[Any]) -> str:
    return "why\nsuccess" if '"answer"' in action_of(messages) else DELIVERED


def rewards_nothing(messages: list[Any]) -> str:
    return "why\nfailure" if '"answer"' in action_of(messages) else DELIVERED


def truthful(messages: list[Any]) -> str:
    """Rewards an answer after this task's own refund; every lookup finds the order delivered."""
    if '"answer"' not in action_of(messages):
        return DELIVERED
    order = messages[-1].text.split("A-")[1].split(".")[0]
    refunded = f"> {render_call('refund', {'order_id': f'A-{order}'})}" in messages[-1].text
    return f"why\n{'success' if refunded else 'failure'}"


Make = Callable[..., Experiment]


@pytest.fixture
def make(tmp_path: Path, scripted: Any) -> Make:
    def make(reply: Any, traces: Sequence[Trajectory], *, said: list[str] | None = None, **settings: Any) -> Experiment:
        buffer = ReplayBuffer(":memory:")
        buffer.extend(traces)
        say = said.append if said is not None else lambda line: None
        chosen = replace(Desk.settings, **settings)
        model = scripted(reply=reply)
        return Experiment(Desk(), tmp_path / "run", chosen, replay_buffer=buffer, experience_model=model, say=say)

    return make


SUCCESSES = [trace(number) for number in range(12)]
ENOUGH = [trace(n, refunds=refunds, index=index) for n in range(20) for index, refunds in enumerate((True, False))]
"""As many real successes and failures as the gate asks for."""


def test_a_dream_that_pays_everything_is_refused_with_the_figure_and_nothing_is_begun(make: Make) -> None:
    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    tokenizer = create_tokenizer(["Refund."], vocab_size=300)
    policy = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1), tokenizer=tokenizer)
    work = make(rewards_all, ENOUGH)
    work.collect()
    figure = r"judge 'model' rewards 20 of 20 recorded failures: 1\.00 \[0\.84.*above max_false_success=0\.05"
    with pytest.raises(UntruthfulDream, match=figure + r".*For example: task train-.*rewarded, why.*force=True"):
        work.train(policy)
    assert not (work.out / "training.db").exists()


def test_a_truthful_dream_passes_and_is_measured_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    work = make(truthful, ENOUGH, said=said)
    gate.check_truthful(work)
    found = work.fidelity()
    assert found.false_success and found.false_success.successes == 0 and found.false_success.episodes >= 40
    assert found.errors[MISSED][:2] == (0, 20) and found.errors[LOOKUP].value == 0
    assert {"recorded failures", "edited/left_out"} <= set(found.by_kind)
    asked = len(work.experience().model.asked)  # type: ignore[union-attr]
    gate.check_truthful(work)
    assert work.fidelity() == found and len(work.experience().model.asked) == asked  # type: ignore[union-attr]
    assert len(said) == 2 and "the responder 'model' answers 0 of 40 repeated lookups differently" in said[0]
    assert "rewards 0 of 20 recorded failures" in said[0] and "does not reward 0 of 20 recorded successes" in said[0]
    (stored,) = work.replay_buffer.metrics(work.run_name("fidelity"))
    assert json.loads(stored["judgement"])["version"] == found.version
    key = work.record(gate.RUN)["key"]
    with monkeypatch.context() as patched:
        patched.setattr(type(work.world), "writing_tools", lambda *_: {"refund", "find"})
        work.fidelity()
    assert work.record(gate.RUN)["key"] != key, "with other writing tools the same episodes are judged in other ways"
    work.replay_buffer.add(trace(99, refunds=False))  # more failures: another question
    assert work.fidelity().false_success != found.false_success


def test_a_check_of_the_users_own_is_said_to_be_measured_by_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Desk, "judged_by_dream", False)
    said = list[str]()
    gate.check_truthful(make(truthful, ENOUGH, said=said))
    assert "the gate measures nothing: a check of your own judges dreamed episodes" in said[-1]


def test_corrected_outcomes_are_measured_again(make: Make) -> None:
    """Also where a training goes on: recorded successes judge, and another one would be taken for what was measured."""
    work = make(truthful, ENOUGH)
    gate.check_truthful(work)
    assert (found := work.fidelity()).by_kind["recorded failures"].episodes
    imported = replace(trace(50), run="traces")
    for given in (imported, imported, corrected := replace(imported, success=False)):
        work.replay_buffer.add(given)
    assert work.replay_buffer.corrections() == 1 and not corrected.success
    asked = len(work.experience().model.asked)  # type: ignore[union-attr]
    gate.check_truthful(work, resumed=True)
    assert len(work.experience().model.asked) > asked and work.fidelity() != found  # type: ignore[union-attr]


def refused(work: Experiment) -> str:
    with pytest.raises(UntruthfulDream) as raised:
        gate.check_truthful(work)
    return str(raised.value)


def test_easy_edits_do_not_dilute_real_failures(make: Make) -> None:
    """7 of 30 real failures paid, beside some 100 edits of which none is."""
    failures = [trace(number, refunds=False) for number in range(100, 130)]

    def lies(messages: list[Any]) -> str:
        seven = any(f"order A-{number}." in messages[-1].text for number in range(100, 107))
        return rewards_all(messages) if seven else truthful(messages)

    work = make(lies, [*(trace(number) for number in range(40)), *failures])
    assert "the judge 'model' rewards 7 of 30 recorded failures" in refused(work)
    judgement = work.fidelity(limit=200)
    assert judgement.false_success and judgement.false_success.value < 0.06, "pooled, they would hardly be seen"


@pytest.mark.parametrize("missed", [42, 20])
def test_missed_successes_count(make: Make, missed: int) -> None:
    def strict(messages: list[Any]) -> str:
        missing = any(f"order A-{number}." in messages[-1].text for number in range(missed))
        return rewards_nothing(messages) if missing else truthful(messages)

    traces = [*(trace(number) for number in range(50)), *(trace(n, refunds=False, index=1) for n in range(20))]
    if missed == 42:
        assert "the judge 'model' does not reward 42 of 50 recorded successes" in refused(make(strict, traces))
    else:
        gate.check_truthful(make(strict, traces))


def test_few_cases_are_enough_to_refuse_and_too_few_to_begin_without_force(make: Make) -> None:
    few = [*ENOUGH[:38], ENOUGH[38]]  # 20 successes, 19 failures
    assert "rewards 19 of 19 recorded failures" in refused(make(rewards_all, few))
    said = list[str]()
    work = make(truthful, few, said=said)
    assert "measured on 19 real failures and 20 real successes" in refused(work) and "force=True" in refused(work)
    work.force = True
    gate.check_truthful(work)
    assert "force=True: the judge 'model' was measured on 19 real failures" in said[-1]
    assert "measured on 0 real failures and 0 real successes" in refused(make(truthful, []))


def test_a_check_of_ones_own_needs_no_number_of_cases(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Verify(lambda task, steps: any("refund" in step.action for step in steps))
    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], judges=[check]))
    gate.check_truthful(make(truthful, []))


def test_a_dream_that_answers_everything_alike_is_refused(make: Make) -> None:
    def own_status(each: Trajectory) -> Trajectory:
        answer = json.dumps({"status": f"shelf {each.task.id}"})
        first, second, *rest = each.steps
        return replace(each, steps=[replace(first, next_observation=answer), replace(second, observation=answer), *rest])

    message = refused(make(truthful, [own_status(each) for each in ENOUGH]))
    assert "the responder 'model' answers everything alike" in message
    assert "answers 40 of 40 repeated lookups differently" in message and "really '{" in message


def test_each_part_is_measured_alone_and_the_worst_decides(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first judge hides the second wherever it decides: in the dream nothing is rewarded wrongly."""

    class Right:
        name = "check"

        def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
            success = any("refund" in step.action for step in episode.steps)
            return Verdict(float(success), success)

    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], judges=[Right(), ModelJudge(model)]))
    monkeypatch.setattr(Desk, "writing_tools", lambda self, buffer: ())  # no edits
    work = make(rewards_all, ENOUGH)
    assert "the judge 'model' rewards 20 of 20 recorded failures" in refused(work)
    judgement = work.fidelity(limit=200)
    assert judgement.false_success and judgement.false_success.value == 0
    assert [(part.role, part.name) for part in judgement.parts] == [
        ("responder", "model"),
        ("judge", "check"),
        ("judge", "model"),
    ]


def test_each_new_version_of_a_part_is_measured_again_and_the_same_one_is_not(make: Make) -> None:
    work = make(truthful, ENOUGH)
    gate.check_truthful(work)
    work.replay_buffer.add(trace(99, refunds=False))
    model = work.experience()
    asked = len(model.model.asked)  # type: ignore[union-attr]
    gate.check_truthful(work, resumed=True)
    assert len(model.model.asked) == asked, "more episodes do not interrupt a training"  # type: ignore[union-attr]
    object.__setattr__(model.model, "reply", rewards_all)
    model.prompter.version = "refreshed"
    with pytest.raises(UntruthfulDream, match="rewards 21 of 21 recorded failures"):
        gate.check_truthful(work, resumed=True)


def test_a_part_that_names_no_version_is_measured_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever mends their own check after a refusal was shown the old figures."""
    pays = True

    def check(task: Task, steps: Sequence[Step]) -> bool:
        return pays or render_call("refund", {"order_id": f"A-{task.id.split('-')[1]}"}) in [step.action for step in steps]

    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], judges=[Verify(check)]))
    monkeypatch.setattr(Desk, "writing_tools", lambda self, buffer: ())  # no edits, of which another limit draws others
    work = make(truthful, ENOUGH)
    assert "the judge 'verify' rewards 20 of 20 recorded failures" in refused(work)
    pays = False
    gate.check_truthful(work, resumed=True)
    pays = True
    with pytest.raises(UntruthfulDream, match="the judge 'verify' rewards 20 of 20"):
        gate.check_truthful(work, resumed=True)
    versioned = Verify(check)
    versioned.version = "2"
    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], judges=[versioned]))
    assert "rewards 20 of 20" in refused(work)
    pays = False
    assert "rewards 20 of 20" in refused(work), "it names the same version"


def test_traces_of_another_environment_measure_no_dream(make: Make) -> None:
    """A buffer may hold those of several agents, held out too."""
    other = [
        replace(each, task=replace(each.task, id=f"o{n}", environment="bank", split="test")) for n, each in enumerate(ENOUGH)
    ]
    found = make(truthful, [*ENOUGH, *other]).fidelity()
    assert found.errors[MISSED].episodes == found.errors["recorded failures"].episodes == 20


def test_goals_and_rubrics_that_changed_are_measured_again(make: Make, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user = ModelUser(scripted(reply=lambda _: "Yes."))
    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], user, judges=[ModelJudge(model)]))
    asks = Step(observation="", action=render_answer("Sure?"), next_observation="Yes.")
    talk = replace(trace(99), steps=[asks, *trace(99).steps])
    work, keys = make(truthful, [*ENOUGH, talk]), list[str]()
    for changes in ({}, {"goal": {"goal": "Refund order A-99."}}, {"rubric": "It is refunded."}):
        work.replay_buffer.add_tasks([replace(task(99), **changes)])
        work.fidelity()
        keys.append(work.record(gate.RUN)["key"])
    assert len(set(keys)) == 3
    user.goal = lambda task: Goal(goal="a gift")  # type: ignore[method-assign]
    work.fidelity()
    assert work.record(gate.RUN)["key"] not in keys, "the user's own goal="


def test_a_dream_that_pays_a_score_on_the_way_misses_no_success(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model never says that a game is won, and its score rises with the last step all the same."""

    class Rises:
        name = "score"

        def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
            return Verdict(0.5, False, terminated=False)

    monkeypatch.setattr(Desk, "create_dream", lambda self, model: Dream([model], judges=[Rises()]))
    step = Step(observation="A.", action="go", next_observation="B.", terminated=True, reward=0.5)
    games = [replace(task(number), tools=None) for number in range(MIN_CASES)]
    traces = [Trajectory(task=each, steps=[step], success=True, run="traces") for each in games]
    found = make(lambda _: "valid, why\nreward 0, continues\nB.", traces).fidelity()
    assert found.errors[MISSED][:2] == (0, MIN_CASES)


def test_a_dream_is_not_measured_with_other_settings_than_the_folder_was_made_with(make: Make) -> None:
    make(truthful, SUCCESSES).open()
    make(truthful, SUCCESSES, num_tasks=3, iterations=1).fidelity()
    with pytest.raises(ConfigurationError, match="was made with retrieved=3, and retrieved=1 is given"):
        make(truthful, SUCCESSES, retrieved=1).fidelity()


def test_a_world_of_free_text_is_asked_a_bounded_number_of_questions(make: Make, scripted: Any) -> None:
    """Each failure there costs a question a step, a success one; both are drawn from."""

    def played(number: int, success: bool) -> Trajectory:
        ends = [{}] * 5 + [{"terminated": True, "reward": float(success)}]
        steps = [Step(observation="A.", action="go", next_observation="A.", **end) for end in ends]  # type: ignore[arg-type]
        given = replace(task(number), observation="A.", tools=None)
        return Trajectory(task=given, steps=steps, success=success, run="traces", rollout_index=int(success))

    work = make(lambda _: "valid, why\nreward 0, failure\nA.", [played(n, good) for n in range(40) for good in (True, False)])
    found = work.fidelity(limit=20)
    assert found.false_success and 5 < found.false_success.episodes < 20 > found.errors[MISSED].episodes
    assert 80 - 6 < 6 * found.false_success.episodes + found.errors[MISSED].episodes <= 80, "no more fit"
    assert len(work.experience().model.asked) <= 80  # type: ignore[union-attr]
    more = work.fidelity(limit=40).false_success
    assert more and more.episodes > found.false_success.episodes


@pytest.mark.parametrize(("more", "refuses"), [((3, 100), False), ((9, 100), True)])
def test_a_figure_a_little_above_the_limit_is_measured_on_more_episodes(
    make: Make, monkeypatch: pytest.MonkeyPatch, more: tuple[int, int], refuses: bool
) -> None:
    asked = list[int]()

    def measure(work: Any, experience: Any, *, limit: int = 50) -> Judgement:
        asked.append(limit)
        paid, of = (2, 24) if limit == 50 else more
        errors = {"recorded failures": Rate(paid, of, *wilson(paid, of)), MISSED: Rate(0, 30, *wilson(0, 30))}
        return Judgement(version="v", parts=[PartJudgement(name="model", role="judge", errors=errors, by_model=True)])

    monkeypatch.setattr(gate, "measure", measure)
    said = list[str]()
    with pytest.raises(UntruthfulDream, match="rewards 9 of 100") if refuses else nullcontext():
        gate.check_truthful(make(truthful, SUCCESSES, said=said))
    assert asked == [50, 200] and (refuses or "rewards 3 of 100" in said[0])


def test_no_limit_or_another_judge_measures_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.check_truthful(make(rewards_all, SUCCESSES, max_false_success=None))
    work = make(rewards_all, SUCCESSES)
    monkeypatch.setattr(work.world, "judged_by_dream", False)
    gate.check_truthful(work)
    assert work.replay_buffer.metrics(work.run_name("fidelity")) == []


def test_a_refused_dream_can_train_on_what_recorded_successes_judge(
    make: Make, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experience model then judges nothing: there is no gate, and no validation task is dreamed."""
    said: list[str] = []
    monkeypatch.setattr(Desk, "judged_by_traces", {"train-0"})
    with pytest.raises(UntruthfulDream, match=r"\(`dreamgym train --references-only`\) on the 1 of 12 tasks that"):
        gate.check_truthful(make(rewards_all, SUCCESSES))
    work = make(rewards_all, SUCCESSES, references_only=True, real_budget=None, said=said)
    work.collect()
    gate.check_truthful(work)
    assert [each.id for each in gate.trainable_tasks(work)] == ["train-0"] and "trains on the 1 of" in said[0]
    curriculum = create_curriculum(work, real=False)
    assert [each.id for each in curriculum.sample(4, iteration=0)] == ["train-0"]
    figures = validate(work, scripted(reply=lambda _: ANSWER), work.dream(), 1)
    assert figures["eval_real_episodes"] == 4 and not {"eval_dream_episodes", "eval_gap"} & set(figures)
    monkeypatch.setattr(Desk, "judged_by_traces", set())
    with pytest.raises(ConfigurationError, match=r"the outcome of none of the \d+ training tasks: import successful traces"):
        gate.trainable_tasks(work)
    monkeypatch.setattr(work.world, "judged_by_dream", False)
    with pytest.raises(ConfigurationError, match="verify_dream=.*leave references_only away"):
        work.train_base()  # before hours of it


def test_after_a_restart_tasks_that_the_dream_could_not_answer_are_still_avoided(make: Make) -> None:
    work = make(rewards_all, SUCCESSES)
    work.collect()
    *unanswered, answered = work.tasks("train")
    run, error = work.run_name(TRAIN), "Unanswered: no responder of the dream answers get_order"
    for task in unanswered:
        work.replay_buffer.add(Trajectory(task=task, source="synthetic", run=run, error=error))
    picked = {task.id for n in range(9) for task in create_curriculum(work, real=False).sample(1, iteration=n)}
    assert picked == {answered.id}


# --- the gap to reality while training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "real"), [(0, [0, 0, 0]), (8, [2, 2, 2]), (None, [4, 4, 4]), (100, [4, 4, 4])])
def test_the_budget_is_shared_by_the_planned_evaluations(
    make: Make, scripted: Any, budget: int | None, real: list[int]
) -> None:
    work = make(rewards_all, SUCCESSES, real_budget=budget)
    work.collect()
    policy = scripted(reply=lambda _: ANSWER)
    figures = [validate(work, policy, work.dream(), iteration) for iteration in (1, 2, 3)]
    assert [each.get("eval_real_episodes", 0) for each in figures] == real
    assert validate(work, policy, work.dream(), 3) == figures[2], "a repeated evaluation spends nothing"


def test_a_spent_budget_is_said_and_the_dream_goes_on_alone(make: Make, scripted: Any) -> None:
    said: list[str] = []
    work = make(rewards_all, SUCCESSES, real_budget=8, said=said)
    work.collect()
    for iteration in range(1, 6):
        figures = validate(work, scripted(reply=lambda _: ANSWER), work.dream(), iteration)
    assert "eval_gap" not in figures and figures["eval_dream_successes"] == 4
    assert "real_budget=8 is spent" in said[-1] and "real_budget=8 is spent" not in said[-2]


def test_the_gap_is_that_of_the_tasks_played_in_both(make: Make, scripted: Any) -> None:
    said: list[str] = []
    work = make(rewards_all, SUCCESSES, real_budget=8, said=said)
    work.collect()
    figures = validate(work, scripted(reply=lambda _: ANSWER), work.dream(), 1)
    assert figures["eval_gap"] == 1 and (figures["eval_gap_low"], figures["eval_gap_high"]) == paired_interval(
        [(True, False)] * 2
    )
    assert "dream 4/4 (on the same tasks 2/2), real 0/2, gap +1.00" in said[0]


def test_figures_of_the_dream_alone_are_shown_as_such(make: Make, scripted: Any) -> None:
    said: list[str] = []
    work = make(rewards_all, ENOUGH, said=said)  # real_budget=0
    work.collect()
    validate(work, scripted(reply=lambda _: ANSWER), work.dream(), 1)
    assert said[-1] == "after 1 iterations: dream 4/4 (dreamed only)"


def test_calls_of_hosted_models_are_announced_before_the_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from dreamgym_lg.experiment.training import _announce_calls

    said, before = list[str](), list[int]()
    work = make(truthful, ENOUGH, said=said, iterations=10, num_tasks=2, num_generations=4, evaluate_every=5)
    work.collect()
    model = work.experience()
    model.prompter.hosted = Hosted()
    _announce_calls(work, work.dream())
    # ten iterations of 8 episodes; two evaluations of 4 tasks, and one of each mode at the end
    # at 2.5 calls: every other trace has a step more
    episodes = "80 training and 16 validation episodes of 2 calls each"
    assert said == [
        f"estimate: 240 calls of the dream's hosted models for {episodes}, as the traces have, and those of the gate"
    ]
    monkeypatch.setattr(gate, "ajudge", lambda *given, **options: before.append(len(said)) or ajudge(*given, **options))
    gate.check_truthful(work)
    # of 40 traces a lookup and the end, and the ends of the edits
    assert before == [2] and said[1] == "the gate asks the hosted models of the dream about 130 questions"
    assert len(model.model.asked) <= 130  # type: ignore[union-attr]
