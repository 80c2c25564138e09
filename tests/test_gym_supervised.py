"""The supervised stages for an own agent: training data as the dream asks it, tokens as rollouts record them."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")
import torch
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from tiny_models import create_model, create_tokenizer

from dreamgym_lg import DreamGym, Experiment, ReplayBuffer, Settings, Step, Task, Trajectory
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Model
from dreamgym_lg.dream.judges import judge_conversations
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import imitation, supervised
from dreamgym_lg.experiment.advice import conclude, has_success, underrepresented_tools
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.evaluation import count_real_steps
from dreamgym_lg.experiment.experience_models import as_trained as as_trained_model
from dreamgym_lg.experiment.training import _check_training, create_curriculum
from dreamgym_lg.integrations.transformers.batch import Batch
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.rollout import rollout
from dreamgym_lg.tasks import reference_episode
from dreamgym_lg.types import Segment

SETTINGS: dict[str, Any] = {
    "experience_steps": 3,
    "base_steps": 10,
    "batch_size": 4,
    "retrieved": 2,
    "evaluate_tasks": 2,
    "concurrency": 4,
}


class Bound(BaseChatModel):
    """The graph's production model, which nobody asks."""

    @property
    def _llm_type(self) -> str:
        return "bound"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        raise AssertionError("nobody asks it")


class Unbound(Bound):
    """One that forgets which tools it is given."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@tool
def find(order: str) -> str:
    """Look up an order."""
    raise AssertionError("it is simulated")


@tool
def refund(order: str) -> str:
    """Pay back an order."""
    raise AssertionError("it is simulated")


def step(observation: str, action: str, answer: str = "", **fields: Any) -> Step:
    return Step(observation=observation, action=action, next_observation=answer, **fields)


def trace(order: str, *, refunds: bool = True, refused: bool = False, split: Any = "train") -> Trajectory:
    """A request for money back as `load_traces` reads it: with the names of the called tools alone, and any reward."""
    asked = f"Refund order {order}."
    task = Task(id=order, instruction=asked, environment="t", observation=asked, tools=["find"], split=split)
    calls = [("find", {"order": order}, f"{order} is delivered", True)]
    calls += [("refund", {"oder": order}, "Error: order is missing", False)] if refused else []
    calls += [("refund", {"order": order}, "ok", True)] if refunds else []
    steps, seen = [], asked
    for name, arguments, answer, valid in calls:
        steps.append(step(seen, render_call(name, arguments), answer, valid=valid))
        seen = answer
    reward = 50.0 if refunds else 0.0
    last = step(seen, render_answer(f"{order} is done."), reward=reward, terminated=True)
    return Trajectory(task=task, steps=[*steps, last], success=refunds, run="traces")


TRACES = [
    *(trace(f"W-{n}") for n in range(8)),
    *(trace(f"W-{n}", refunds=False) for n in range(10, 14)),
    trace("W-20", refused=True),
]
VALIDATION = [trace(f"W-{n}", split="validation").task for n in range(30, 32)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., DreamGym]:
    def make(traces: Any = TRACES, out: str = "run", **options: Any) -> DreamGym:
        buffer = ReplayBuffer(tmp_path / f"{out}.db")
        buffer.extend(traces)
        graph = create_agent(Bound(), [find, refund], system_prompt="You refund.")
        tasks = [*buffer.tasks(split="train"), *VALIDATION]
        settings = replace(AgentWorld.settings, **SETTINGS)
        given = {"experience_model": None, "tasks": tasks, "out": tmp_path / out, "settings": settings, **options}
        return DreamGym(graph, replay_buffer=buffer, writes=["refund"], **given)

    return make


def tiny() -> LocalChatModel:
    texts = [json.dumps(step.action) for each in TRACES for step in each.steps]
    tokenizer = create_tokenizer([*texts, "valid, it reads, order from the task\nreward 0, continues\n"], vocab_size=400)
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=8192)
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="tiny", max_new_tokens=60)


def test_training_asks_word_for_word_what_the_dream_asks(make: Callable[..., DreamGym], scripted: Any) -> None:
    """The recorded actions, played in the dream of a model that answers as recorded, give the prompts of the training data."""
    work = make(without_writes(TRACES)).experiment
    for recorded in (TRACES[0], TRACES[-1]):
        (shown,) = work.world.as_dreamed([recorded])
        assert [tool["function"]["name"] for tool in shown.task.tools] == ["find", "refund"], "not only the called"
        assert shown.steps[-1].reward == 1.0 and all(each.valid for each in shown.steps), "the graph itself refuses the other"
        (response,), (verdict,) = conversations(work, shown)
        asked = list[Any]()
        played = dreamed(work, as_trained([response, verdict], asked, scripted), recorded)
        assert played.error is None and played.success
        assert asked == [response[:-3], response[:-1], verdict[:-1]]
        assert [each.decided_by for each in played.steps if each.valid] == ["model", "model", ""]
        assert played.steps[-1].judged_by == "model" and played.steps[-1].reasoning == "it completes the task"


def test_the_gate_shows_a_judge_the_system_prompt_that_training_shows_it(make: Callable[..., DreamGym], scripted: Any) -> None:
    """A trace from a checkpointer has no system message, and a JSON judge reads the agent's own."""
    chat = scripted(reply=lambda messages: '{"reason": "so it seems", "success": true}')
    gym = make(without_writes(TRACES), experience_model=Model(chat, prompt_format="json"))
    gym.experiment.fidelity()
    judged = [json.loads(messages[1].text) for messages in chat.asked if messages[0].text.startswith("You judge")]
    assert judged and {each.get("rules") for each in judged} == {"You refund."}


def test_a_verdict_with_a_recorded_success_beside_it_is_learned_as_the_dream_asks_for_it(
    make: Callable[..., DreamGym], scripted: Any
) -> None:
    """Of a task that is only to be looked up; where it is to be written, the recorded success decides itself."""
    read_only = replace(trace("W-1", refunds=False), success=True)
    work = make([read_only, trace("W-2")]).experiment
    shown, written = work.world.as_dreamed([read_only, trace("W-2")])
    (response,), verdicts = conversations(work, shown)
    assert ["a recorded success:" in messages[1]["content"] for messages in verdicts] == [True, False]
    asked = list[Any]()
    played = dreamed(work, as_trained([response, *verdicts], asked, scripted), read_only)
    assert played.success and asked == [verdicts[0][:-1]], "its calls were recorded"
    _, (alone,) = conversations(work, written)
    assert "a recorded success:" not in alone[1]["content"]


def without_writes(traces: Any) -> list[Trajectory]:
    """The same traces of other tasks of another world: they neither answer nor judge those of this one."""
    return [replace(each, task=replace(each.task, id=f"other-{n}", environment="other")) for n, each in enumerate(traces)]


def conversations(work: Experiment, trajectory: Trajectory) -> tuple[list[Any], list[Any]]:
    """The training data of one episode: of the responder, of the judge."""
    model = work.experience()
    verdicts = asyncio.run(judge_conversations(work.world.create_dream(model), trajectory))
    return [in_roles(model.training_conversation(trajectory))], [in_roles(messages) for messages in verdicts]


def in_roles(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    return [{"role": roles[message.type], "content": message.text} for message in messages]


def as_trained(training_data: list[Any], asked: list[Any], scripted: Any) -> BaseChatModel:
    """Answers with what follows a prompt in the training data, which has to hold it word for word."""

    def reply(messages: list[BaseMessage]) -> str:
        asked.append(in_roles(messages))
        (answer,) = [each[len(messages)]["content"] for each in training_data if each[: len(messages)] == asked[-1]]
        return str(answer)

    model: BaseChatModel = scripted(reply=reply)
    return model


def dreamed(work: Experiment, model: BaseChatModel, recorded: Trajectory, policy: BaseChatModel | None = None) -> Trajectory:
    """The recorded actions, or those of `policy`, in the dream of a model."""
    dream = work.world.create_dream(as_trained_model(model, work.settings, work.replay_buffer, "experience-0"))
    agent = work.world.agent(policy or Says(actions=[each.action for each in recorded.steps]), real=False)
    (played,) = asyncio.run(rollout(agent, [recorded.task], dream.create_environment, source="synthetic"))
    return played


class Says(BaseChatModel):
    """Says these actions, one a reply."""

    actions: list[str]
    cache: bool = False

    @property
    def _llm_type(self) -> str:
        return "says"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        action = json.loads(self.actions.pop(0))
        calls = (
            [{"name": action["name"], "args": action["arguments"], "id": str(len(self.actions))}] if "name" in action else []
        )
        return ChatResult(generations=[ChatGeneration(message=AIMessage(action.get("answer", ""), tool_calls=calls))])


def test_a_base_policy_learns_the_tokens_that_its_rollouts_record(
    make: Callable[..., DreamGym], scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gym, policy, recorded = make(without_writes(TRACES)), tiny(), TRACES[0]
    recorded = replace(recorded, steps=[replace(recorded.steps[0], words="W-0."), *recorded.steps[1:]])
    (row,) = gym.world.policy_rows([recorded], policy.tokenizer, max_new_tokens=60)
    policy.tokenizer.chat_template += "{% if quiet %}nothink{% endif %}"
    prompted = gym.world.policy_rows([recorded], policy.tokenizer, max_new_tokens=60, chat_template_kwargs={"quiet": True})
    assert prompted and all("nothink" in policy.tokenizer.decode(each.segment.token_ids) for each in prompted)
    learned = list(compress(row.segment.token_ids, row.segment.sampled))
    script, draw = list(learned), Batch._draw

    def steered(self: Any, logprobs: Any) -> Any:
        tokens = draw(self, logprobs)
        tokens[0] = script.pop(0)
        return tokens

    monkeypatch.setattr(Batch, "_draw", steered)
    training_data = [each for part in conversations(gym.experiment, *gym.world.as_dreamed([recorded])) for each in part]
    played = dreamed(gym.experiment, as_trained(training_data, [], scripted), recorded, policy)
    (segment,) = played.segments
    assert played.error is None and [each.action for each in played.steps] == [each.action for each in recorded.steps]
    assert list(segment.token_ids) == list(row.segment.token_ids)
    assert "W-0.\n<tool_call>" in policy.tokenizer.decode(row.segment.token_ids), "what was said beside a call is learned too"
    assert list(segment.sampled) == list(row.segment.sampled)


def test_what_does_not_replay_is_left_out_and_said(make: Callable[..., DreamGym], caplog: Any) -> None:
    gym, policy = make(), tiny()
    strange = trace("W-9")
    strange = Trajectory(task=strange.task, steps=[*strange.steps, strange.steps[0]], success=True)  # a call behind the end
    rows = gym.world.policy_rows([TRACES[0], strange], policy.tokenizer, max_new_tokens=60)
    assert len(rows) == 1 and "1 of 2 recorded successes do not replay" in caplog.text
    assert "ends after 3 of the 4" in caplog.text
    with pytest.raises(ConfigurationError, match="1 of 1 recorded successes do not replay"):
        gym.world.policy_rows([strange], policy.tokenizer, max_new_tokens=60)
    with pytest.raises(ConfigurationError, match="raise policy_tokens"):
        gym.world.policy_rows([TRACES[0]], policy.tokenizer, max_new_tokens=3)
    toolless = AgentWorld(create_agent(Unbound(), [find, refund], system_prompt="You refund."))
    with pytest.raises(ConfigurationError, match=r"the graph gives its model no tools.*does the bind_tools\(\)"):
        toolless.policy_rows([TRACES[0]], policy.tokenizer, max_new_tokens=60)


@pytest.mark.slow
def test_judge_and_responder_learn_alike_and_edits_are_no_real_data(make: Callable[..., DreamGym]) -> None:
    gym, said = make(say=lambda line: said.append(line)), list[str]()
    gym.train_experience(tiny())
    work = gym.experiment
    shown = gym.world.as_dreamed(work.experience_data()[0])
    edited = supervised._edited(work, shown, None)
    assert edited and all(each.run.startswith("edited/") and not each.success for each in edited)
    rows = supervised._rows(work, work.models / "experience-0-start", shown, edited)
    tokenizer = tiny().tokenizer
    replies = [tokenizer.decode(list(compress(row.segment.token_ids, row.segment.sampled))) for row in rows]
    judged = Counter(reply.rpartition("\n")[2].split("<")[0] for reply in replies if "valid, " not in reply)
    assert judged["success"] == judged["failure"] == len(edited) + sum(not each.success for each in shown)
    assert judged.total() * 2 == len(rows), "as many rows of the responder"
    recorded = sum(len(each.steps) for each in TRACES)
    assert gym.replay_buffer.count("steps") == recorded == count_real_steps(work)["offline"]
    assert (work.models / "experience-0").exists() and "10 recorded episodes are few" in said[0]


@pytest.mark.slow
def test_stages_go_on_and_hold_their_model(make: Callable[..., DreamGym], monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def kill(label: str, done: int, total: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        make(progress=kill).train_experience(tiny())
    gym = make()
    assert not (gym.experiment.models / "experience-0").exists()
    gym.train_experience(tiny())
    version = (gym.experiment.models / "experience-0" / "version").read_text()
    make().train_experience()
    assert (gym.experiment.models / "experience-0" / "version").read_text() == version, "what is done is not done again"
    with pytest.raises(ConfigurationError, match="made of the model 'tiny', and 'other' is given: take another folder"):
        make().train_experience("other")

    losses = dict[str, list[float]]()

    def progress(label: str, done: int, total: int) -> None:
        if done:  # before the first step there is no loss
            losses.setdefault(label.partition(" (")[0], []).append(float(label[-5:-1]))

    gym = make(progress=progress)
    monkeypatch.setattr(imitation, "_evaluate", lambda *_: None)
    with pytest.raises(ConfigurationError, match="made of the annotator 'None', and 'openai:gpt-5' is given"):
        make().train_experience(annotator="openai:gpt-5")
    gym.train_base(tiny())
    assert losses["base policy"][-1] < losses["base policy"][0] - 0.2
    assert [path.name for path in gym.experiment.models.glob("base*")] == ["base"]


@pytest.mark.parametrize(
    ("settings", "tasks", "told"),
    [
        ({"references_only": True, "real_budget": 0}, VALIDATION, "real_budget=0 plays no validation task"),
        pytest.param(
            {"real_budget": None}, [TRACES[0].task], "there is no task of the split 'validation'", marks=pytest.mark.slow
        ),
    ],
)
def test_a_base_policy_that_nothing_evaluates_is_trained_to_its_end(
    make: Callable[..., DreamGym], settings: dict[str, Any], tasks: Any, told: str
) -> None:
    """Under references_only it was chosen by the verdicts of an experience model that was not to judge anything."""
    said = list[str]()
    gym = make(settings=replace(AgentWorld.settings, **{**SETTINGS, **settings}), tasks=tasks, say=said.append)
    gym.train_base(tiny())
    (line,) = (each for each in said if each.endswith("which weights of the base policy are kept"))
    assert line.startswith(told) and [path.name for path in gym.experiment.models.glob("base*")] == ["base"]


@pytest.mark.slow
def test_the_base_policy_is_evaluated_three_times_and_the_best_is_kept(
    make: Callable[..., DreamGym], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = replace(AgentWorld.settings, **{**SETTINGS, "real_budget": None}), list[str]()
    gym, counts = make(settings=settings, say=said.append), iter([4, None, 1, 3, 2])  # killed before the second
    weights: list[Any] = []

    class Killed(BaseException): ...

    def play(run: str, policy: Any, *_: Any, **__: Any) -> list[Trajectory]:
        weights.append({name: value.clone() for name, value in policy.model.state_dict().items()})
        if (good := next(counts)) is None:
            raise Killed
        return [replace(TRACES[0], success=number < good) for number in range(4)]

    monkeypatch.setattr(gym.experiment, "play", play)
    with pytest.raises(Killed):
        gym.train_base(tiny())
    assert not (gym.experiment.models / "base").exists()
    weights.clear()
    gym.train_base(tiny())
    assert [path.name for path in gym.experiment.models.glob("base*")] == ["base"]
    assert [line for line in said if line.startswith("base policy after")][-1] == "base policy after 10 of 10 steps: real 2/4"
    assert said[-1].startswith("the base policy wins 3 of ")
    kept = gym.experiment.policy("base").model.state_dict()
    assert all(torch.equal(value, weights[1][name]) for name, value in kept.items())
    assert not torch.equal(kept["model.embed_tokens.weight"], weights[2]["model.embed_tokens.weight"])


def group(*outcomes: bool | str) -> list[Trajectory]:
    tokens = Segment(token_ids=[1, 2], sampled=[0, 1], logprobs=[0.0, -1.0])
    return [
        replace(TRACES[0], success=False, error=each, segments=[tokens])
        if isinstance(each, str)
        else replace(TRACES[0], success=each, segments=[tokens], steps=[replace(TRACES[0].steps[0], reward=float(each))])
        for each in outcomes
    ]


WON, LOST, MIXED, UNKNOWN = group(True, True), group(False, False), group(True, False), group("Unanswered: what?", False)


@pytest.mark.parametrize(
    ("best", "tasks", "groups", "refusal", "verdict", "why"),
    [
        (0, 20, [], "", "collect", "import more successes"),
        (13, 20, [], "", "train", "may add to it"),
        (20, 20, [MIXED], "", "stop", "loses 0 of 20 validation tasks"),
        (44, 48, [MIXED], "", "stop", "loses 4 of 48 validation tasks"),
        (47, 60, [MIXED], "", "train", "may add"),
        (4, 4, [MIXED], "", "train", "may add"),
        (13, 20, [MIXED, LOST, LOST, LOST], "", "train", "may add"),
        (13, 20, [LOST] * 4 + [WON], "", "collect", f"import successes for tasks like {TRACES[0].task.id}"),
        (13, 20, [UNKNOWN] * 3 + [WON], "", "collect", "of calls that the dream cannot answer (in 3 of 4 groups)"),
        (13, 20, [WON] * 4 + [LOST], "", "stop", "rewards nearly all that imitation does"),
        (13, 20, [MIXED], "the gate refuses the dream: the judge lies", "collect", "the judge lies"),
    ],
)
def test_advice_follows_from_imitation_the_gate_and_a_dreamed_iteration(
    best: int, tasks: int, groups: Any, refusal: str, verdict: str, why: str
) -> None:
    advice = conclude(best, tasks, groups, refusal)
    assert advice.verdict == verdict and why in advice.why


def test_second_tries_learn_from_every_group_with_a_success() -> None:
    assert conclude(13, 20, [WON] * 4 + [LOST], useful=has_success).verdict == "train"
    assert conclude(13, 20, [WON] + [LOST] * 4, useful=has_success).verdict == "collect"


def test_tools_that_drawn_tasks_hardly_call_are_lost() -> None:
    def drawn(*tools: str) -> Task:
        steps = [[render_call(tool, {}), ""] for tool in tools]
        return replace(TRACES[0].task, drawn={"steps": [*steps, [render_answer("Done."), ""]]})

    successes = [trace(f"W-{n}", refunds=True) for n in range(4)]
    assert underrepresented_tools(successes, [drawn("look_up")] * 9, ["refund"]) == ["refund"]
    assert underrepresented_tools(successes, [drawn("look_up")] * 6 + [drawn("refund")] * 2, ["refund", "cancel"]) == ["refund"]
    assert underrepresented_tools(successes, [drawn("look_up")] * 3 + [drawn("refund")] * 3, ["refund", "cancel"]) == []
    assert underrepresented_tools(successes, [drawn("look_up")] * 2, ["refund"]) == [], "too few to tell"
    assert underrepresented_tools(successes, [drawn("look_up"), *(each.task for each in successes)], ["refund"]) == [], (
        "recorded tasks too"
    )
    assert underrepresented_tools(successes, [TRACES[0].task] * 9, ["refund"]) == [], "recorded tasks alone"


def test_references_of_drawn_tasks_are_imitated_beside_the_recorded_successes(make: Callable[..., DreamGym]) -> None:
    new = trace("W-77")
    steps = [[each.action, each.next_observation] for each in new.steps]
    drawn = replace(new.task, id="drawn", origin="synthetic", drawn={"documents": [], "steps": steps, "told": [], "untold": []})
    assert [replace(each, decided_by="", reward=0.0) for each in reference_episode(drawn).steps] == [
        replace(each, reward=0.0) for each in new.steps
    ]
    said = list[str]()
    settings = replace(AgentWorld.settings, **SETTINGS, real_budget=0, references_only=True)
    gym = make(tasks=[drawn, *VALIDATION], say=said.append, settings=settings)
    assert {each.id for each in gym.tasks("train")} == {"drawn", *(each.task.id for each in TRACES)}, "recorded ones stay"
    work = gym.experiment
    work.train_base(tiny())
    work.train_experience(tiny())  # not SmolLM2
    work.prepare(baselines=["sft-drawn"])
    assert work.base_policy().name_or_path.endswith("base"), "no validation task was played"
    for name, successes in (("base", 1), ("drawn", 2)):
        best = work.record(f"stage/{name}/best")["folder"]
        work.keep_record(f"best/{best}", {"at": 10, "successes": successes, "reward": 0.5})
    assert work.base_policy().name_or_path.endswith("drawn"), "training begins with the best baseline"
    recorded = {name: work.record("stage/base/best")[name] for name in ("folder", "validation")}
    work.keep_record("stage/base/best", {**recorded, "validation": "real 60"})
    assert work.base_policy().name_or_path.endswith("base"), "other validation tasks do not compare"
    work.keep_record("stage/base/best", recorded)
    (work.out / "training.db").touch()
    assert work.base_policy().name_or_path.endswith("base"), "a training that has begun goes on"
    work.keep_record("stage/train/baseline", {"name": "drawn"})
    assert work.base_policy().name_or_path.endswith("drawn"), "with the one that it began with"
    assert (work.models / "drawn").exists()
    assert [line.split(",")[0] for line in said if " episodes, 10 steps" in line] == [
        "base policy: 8 episodes", "drawn policy: 9 episodes"
    ]  # fmt: skip
    none = make(out="none", settings=work.settings).experiment
    none.train_base(tiny())
    none.train_drawn()
    assert not (none.models / "drawn").exists(), "nothing was drawn"


def test_drawn_tasks_alone_leave_the_validation_split_and_the_real_tools_alone(make: Callable[..., DreamGym]) -> None:
    steps = [[each.action, each.next_observation] for each in trace("W-77").steps]
    drawn = replace(trace("W-77").task, id="drawn", origin="synthetic", drawn={"documents": [], "steps": steps})
    first, again = make(tasks=[drawn]), make(tasks=[drawn])
    held_out = [{each.id for each in gym.tasks("validation")} for gym in (first, again)]
    assert held_out[0] and held_out[0] == held_out[1], "as after a restart"
    sampled = create_curriculum(again.experiment, real=True).sample(20, iteration=0)
    assert sampled and not any(each.drawn for each in sampled)
    only_drawn = SimpleNamespace(settings=Settings(environment="dream+real", real_steps=9), tasks=lambda split: [drawn])
    with pytest.raises(ConfigurationError, match="environment='dream.real', and all training tasks are drawn ones"):
        _check_training(only_drawn, None, real=False)  # type: ignore[arg-type]


def test_a_base_policy_cannot_be_judged_in_a_dream_that_is_not_there(make: Callable[..., DreamGym]) -> None:
    with pytest.raises(ConfigurationError, match="holds no experience model: call train_experience"):
        make().train_base(tiny())


def test_what_is_missing_is_said(make: Callable[..., DreamGym], scripted: Any) -> None:
    failed = [trace(f"W-{n}", refunds=False) for n in range(3)]
    with pytest.raises(ConfigurationError, match="none of the 3 recorded episodes that end in a message is a success"):
        make(failed, "failed").train_experience(tiny())
    with pytest.raises(ConfigurationError, match="no recorded trajectory of the split 'train' to learn from"):
        make([], "nothing").train_experience(tiny())
    with pytest.raises(ConfigurationError, match="no offline trajectory of 3 is a success"):
        make(failed, "failed").train_base(tiny())
    hosted = make(out="hosted", experience_model=scripted(reply=str))
    with pytest.raises(ConfigurationError, match="leave out one of the two"):
        hosted.train_experience(tiny())
    hosted.train_experience()
    assert not hosted.experiment.models.exists()


def test_an_annotator_writes_the_reasoning_of_traces_and_edits(make: Callable[..., DreamGym], scripted: Any) -> None:
    def write(messages: list[BaseMessage]) -> str:
        steps = json.loads(messages[-1].text)["steps"]
        plans = [{"step": each["step"], "transition_plan": f"because {each['step']}"} for each in steps]
        return json.dumps({"overall_plan": "a", "success_mode": "b", "failure_mode": "c", "transition_plans": plans})

    gym, annotator = make(), scripted(reply=write)
    gym.train_experience(tiny(), annotator=annotator)
    stored = list(gym.replay_buffer.trajectories())
    assert all(each.reasoning.startswith("because") for trajectory in stored for each in trajectory.steps)
    with ReplayBuffer(gym.experiment.out / "edited.db") as edited:
        found = list(edited.trajectories())
    assert found and all(each.reasoning.startswith("because") for trajectory in found for each in trajectory.steps)
    assert len(annotator.asked) == len(stored) + len(found)
