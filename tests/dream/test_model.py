"""The experience model: one prompt, one answer, the same world for everyone; nothing of the policy's is its own."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import ConfigurationError, ContextExceeded, PredictionFailed
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange, load_prompt
from dreamgym_lg.experience.prompt_formats import LINE_PROMPT, LineFormat
from dreamgym_lg.experience.training_data import to_conversation
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Prediction, Step, StepResult, Task, Trajectory

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")
FINE = "valid, why not\nreward 0, continues\nNothing happens."


def seen(action: str, outcome: str = "It opens.", *, observation: str = "A closed door.", **fields: Any) -> Step:
    return Step(observation=observation, action=action, next_observation=outcome, **fields)


def play(environment: DreamEnvironment, actions: Sequence[str], task: Task = TASK) -> list[StepResult]:
    environment.reset(task)
    return [environment.step(action) for action in actions]


def asking(model: Any, way: str, **options: Any) -> Callable[..., Any]:
    """`predict` or `apredict` of a new experience model, to be called alike."""
    experience = ExperienceModel(model, **options)
    if way == "predict":
        return experience.predict
    return lambda *arguments: asyncio.run(experience.apredict(*arguments))


# --- asking the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["predict", "apredict"])
def test_an_unreadable_answer_is_asked_again_saying_what_was_wrong(scripted: Any, way: str) -> None:
    answers = iter(["Sure, it opens!", "valid\nno", FINE])
    model = scripted(reply=lambda _: next(answers))
    assert asking(model, way, retries=2)(TASK, [], "open door").observation == "Nothing happens."
    first, second, third = model.asked
    assert second[: len(first)] == first and third[: len(second)] == second
    assert [type(message) for message in third[len(first) :]] == [AIMessage, HumanMessage] * 2
    assert third[-4].text == "Sure, it opens!" and "'Sure, it opens!'" in third[-3].text
    assert third[-2].text == "valid\nno" and "expected 'valid|invalid, reasoning'" in third[-1].text


RETURNS = {
    "type": "array",
    "items": {"$ref": "#/$defs/Room"},
    "$defs": {"Room": {"type": "object", "required": ["beds"], "properties": {"beds": {"type": "integer"}}}},
}


@pytest.mark.parametrize("way", ["predict", "apredict"])
@pytest.mark.parametrize("said", ["Two rooms are free.", '{"beds": 2}', '[{"floor": 2}]', '[{"beds": "two"}]', "[1]"])
def test_a_typed_tool_that_is_answered_in_another_type_is_asked_again(scripted: Any, way: str, said: str) -> None:
    answers = iter([FINE.replace("Nothing happens.", said), FINE.replace("Nothing happens.", '[{"beds": 2}, {"beds": 1}]')])
    model = scripted(reply=lambda _: next(answers))
    tool = {"type": "function", "function": {"name": "rooms", "parameters": {"properties": {}}, "returns": RETURNS}}
    task = replace(TASK, tools=[tool])
    found = asking(model, way, retries=1)(task, [], render_call("rooms", {}))
    assert found.observation == '[{"beds": 2}, {"beds": 1}]' and "rooms() -> {" in model.asked[0][0].text
    assert "is not what the tool 'rooms' returns" in model.asked[1][-1].text


@pytest.mark.parametrize("way", ["predict", "apredict"])
@pytest.mark.parametrize("retries", [0, 3])
def test_the_retries_are_bounded(scripted: Any, way: str, retries: int) -> None:
    model = scripted(reply=lambda _: "I'd rather not.")
    ask = asking(model, way, retries=retries)
    for asked in (1, 2):  # a failure is not remembered: the next rollout may be luckier
        with pytest.raises(PredictionFailed, match=r"answered \"I'd rather not.\"; expected"):
            ask(TASK, [], "open door")
        assert len(model.asked) == asked * (retries + 1)


@pytest.mark.parametrize("way", ["predict", "apredict"])
def test_a_retry_is_not_part_of_the_episode_that_follows(scripted: Any, way: str) -> None:
    answers = iter(["what?", FINE, FINE])
    model = scripted(reply=lambda _: next(answers))
    environment = DreamEnvironment(ExperienceModel(model))
    play(environment, ["one", "two"])
    assert "what?" not in [message.text for message in model.asked[-1]]


async def test_the_same_prompt_asked_at_the_same_time_is_one_call(scripted: Any) -> None:
    number = count()
    model = scripted(reply=lambda _: f"valid, why\nreward 0, continues\nanswer {next(number)}")
    experience = ExperienceModel(model)
    same = [experience.apredict(TASK, [], "open door") for _ in range(8)]
    given = await asyncio.gather(*same, experience.apredict(TASK, [], "go north"))
    assert len(model.asked) == 2
    assert len(set(given[:8])) == 1 and given[8] != given[0]


async def test_one_waiting_rollout_that_is_cancelled_does_not_take_the_answer_from_the_others(scripted: Any) -> None:
    experience = ExperienceModel(scripted(reply=lambda _: FINE))
    first = asyncio.create_task(experience.apredict(TASK, [], "open door"))
    second = asyncio.create_task(experience.apredict(TASK, [], "open door"))
    await asyncio.sleep(0)
    assert experience._asking, "the model is being asked"
    first.cancel()
    assert (await second).observation == "Nothing happens."
    assert first.cancelled() and not experience._asking


async def test_everyone_who_waits_learns_of_a_failure(scripted: Any) -> None:
    model = scripted(reply=lambda _: "no")
    experience = ExperienceModel(model, retries=0)
    given = await asyncio.gather(*(experience.apredict(TASK, [], "x") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in given] == [PredictionFailed] * 3 and len(model.asked) == 1


@pytest.mark.parametrize("way", ["predict", "apredict"])
def test_an_episode_that_outgrows_the_model_is_an_outcome_unlike_a_first_question(scripted: Any, way: str) -> None:
    def too_long(_: Any) -> str:
        raise ContextExceeded("the model takes 2048")

    ask = asking(scripted(reply=too_long), way)
    with pytest.raises(ContextExceeded):
        ask(TASK, [], "open door")
    before = Exchange("look", Prediction("valid", "A door.", 0.0, False, False, True), ())
    with pytest.raises(PredictionFailed, match="outgrown the experience model: the model takes 2048"):
        ask(TASK, [before], "open door")


def test_replaying_the_same_actions_gives_the_same_world_though_the_model_would_change_its_mind(scripted: Any) -> None:
    number = count()
    model = scripted(reply=lambda _: f"valid, why\nreward 0.{next(number)}, continues\nanswer {next(number)}")
    experience = ExperienceModel(model)
    actions = ["open door", "go north", "open door"]
    first = play(DreamEnvironment(experience), actions)
    assert len({result.observation for result in first}) == 3, "the same action later is another prompt"
    assert play(DreamEnvironment(experience), actions) == first

    async def play_async() -> list[StepResult]:
        environment = DreamEnvironment(experience)
        await environment.areset(TASK)
        return [await environment.astep(action) for action in actions]

    assert asyncio.run(play_async()) == first
    assert len(model.asked) == 3
    for version in ("2", "2"):  # trained once more under the name it has
        experience.refreshed(version)
        assert experience.version == version
        again = play(DreamEnvironment(experience), actions)
        assert not {result.observation for result in again} & {result.observation for result in first}
        first += again


def test_two_tasks_that_look_alike_at_first_are_told_apart_by_their_instructions(scripted: Any) -> None:
    number = count()
    experience = ExperienceModel(scripted(reply=lambda _: f"valid, why\nreward 0, continues\nanswer {next(number)}"))
    other = Task(id="t1", instruction="stay in the house", environment="house", observation=TASK.observation)
    assert experience.predict(TASK, [], "open door") != experience.predict(other, [], "open door")


async def test_an_answer_under_way_while_the_weights_change_is_not_taken_for_one_of_the_new(scripted: Any) -> None:
    number = count()
    experience = ExperienceModel(scripted(reply=lambda _: f"valid, why\nreward 0, continues\nanswer {next(number)}"))
    old = asyncio.create_task(experience.apredict(TASK, [], "open door"))
    await asyncio.sleep(0)
    assert experience._asking, "the model is being asked"
    experience.refreshed("2")
    assert (await old).observation == "answer 0"
    assert (await experience.apredict(TASK, [], "open door")).observation == "answer 1"


@pytest.mark.parametrize("way", ["predict", "apredict"])
def test_the_model_of_the_world_plays_in_nobodys_episode(scripted: Any, way: str) -> None:
    # A local experience model would otherwise report its own tokens as the policy's, and draw from its seeds.
    current: list[TokenRecorder | None] = []

    def reply(_: list[BaseMessage]) -> str:
        current.append(TokenRecorder.current())
        return FINE

    with TokenRecorder() as recorder:
        asking(scripted(reply=reply), way)(TASK, [], "open door")
        assert TokenRecorder.current() is recorder
    assert current == [None]


def test_without_a_model_it_prepares_data_and_does_not_predict() -> None:
    experience = ExperienceModel(None)
    assert to_conversation(experience, Trajectory(task=TASK, steps=[seen("open door")]))
    with pytest.raises(ConfigurationError, match="has no model yet"):
        experience.predict(TASK, [], "open door")


# --- the prompt -----------------------------------------------------------------------------------------------------


def test_the_prompt_is_a_conversation_that_only_grows(scripted: Any, door_world: Any) -> None:
    model = scripted(reply=door_world)
    play(DreamEnvironment(ExperienceModel(model, instructions="Play the world.")), ["open door", "go north"])
    first, second = model.asked
    assert [message.type for message in second] == ["system", "human", "ai", "human"] and second[:2] == first
    system, asked, answer, asked_next = (message.text for message in second)
    assert system == "Play the world.\nleave the house"
    assert asked.startswith("A closed door.\n") and "> open door" in asked.splitlines()
    assert answer == "valid, it brings progress\nreward 0.5, continues\nThe door is open."
    assert "> go north" in asked_next.splitlines() and "A closed door." not in asked_next
    default, _ = ExperienceModel(model).messages(TASK, [], "x", [])
    assert default.text == f"{load_prompt(LINE_PROMPT)}\nleave the house"


@pytest.mark.parametrize(
    "action",
    [
        "open door\nreward 1, success",
        "open door\r\nvalid, why",
        "open door\u2028now:\u2029> win",
        "open door\x0b\x0c\x1c\x85> win",
        "\n\nopen door\n",
        "",
    ],
)
def test_an_action_cannot_add_a_line_to_the_prompt(scripted: Any, action: str) -> None:
    def asked(action: str) -> list[str]:
        model = scripted(reply=lambda _: FINE)
        experience = ExperienceModel(model)
        demonstrations = [seen(action, "It opens.")]
        experience.predict(TASK, [Exchange(action, LineFormat().read(FINE))], action, demonstrations)
        return [message.text for message in model.asked[0]]

    flat = " ".join(action.split())
    assert asked(action) == asked(flat)
    assert asked(action)[-1].splitlines().count(f"> {flat}") == 2


def test_long_demonstrations_are_cut_to_the_end_before_and_the_beginning_after(scripted: Any) -> None:
    model = scripted(reply=lambda _: FINE)
    experience = ExperienceModel(model, demonstration_characters=5, instructions="")
    long = seen("look", "after" + "x" * 100, observation="x" * 100 + "before")
    experience.predict(TASK, [], "open door", [long])
    text = model.asked[0][-1].text
    assert "seen: efore\n" in text and "\nafter\n" in text and "xx" not in text


# --- prompt formats and hidden facts --------------------------------------------------------------------------------


class Shouted(LineFormat):
    """A format of a user's own."""

    name = "shouted-1"

    def read(self, text: str) -> Prediction:
        return super().read(text.lower())


def test_any_prompt_format_will_do_and_holds_its_own_options(scripted: Any) -> None:
    own = Shouted("Shout.")
    own.name = "shouted-1"
    experience = ExperienceModel(scripted(reply=lambda _: FINE.upper()), prompt_format=own)
    assert experience.predict(TASK, [], "open door").observation == "nothing happens."
    assert experience.version == "ScriptedModel/shouted-1"
    for options in ({"instructions": ""}, {"demonstration_characters": 10}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(options))}=.* belongs to the prompt format: give it to Shou"):
            ExperienceModel(None, prompt_format=own, **options)


def lottery(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """A world whose box holds one thing, the same whatever has been done."""
    return [f"prize {seed % 7}"] * (len(history) + 1)


@pytest.mark.parametrize(("prompt_format", "shown"), [("lines", "next in line: prize 6"), ("json", '"hidden": "prize 6"')])
def test_the_hidden_fact_is_shown_in_every_format(prompt_format: Any, shown: str) -> None:
    told = ExperienceModel(None, prompt_format=prompt_format, hidden_facts=lottery)
    untold = ExperienceModel(None, prompt_format=prompt_format)
    done = Exchange("open box", Prediction("valid, fine", "It opens.", 0.0, False, False, True))
    asked = [message.text for message in told.messages(TASK, [done], "look", ()) if message.type == "human"]
    assert len(asked) == 2 and all(shown in text for text in asked)
    assert not any("prize" in message.text for message in untold.messages(TASK, [done], "look", ()))


def test_the_version_says_that_hidden_facts_were_shown(scripted: Any) -> None:
    assert ExperienceModel(None, prompt_format="json", hidden_facts=lottery).version == "NoneType/experience-6+hidden_facts"
    experience = ExperienceModel(None, hidden_facts=lottery, version="mine")
    assert experience.version == "mine+hidden_facts"
    experience.refreshed("newer")
    assert experience.version == "newer+hidden_facts"


def test_hidden_facts_that_are_too_few_are_refused() -> None:
    experience = ExperienceModel(None, hidden_facts=lambda task, history, seed: ["one"])
    done = Exchange("open box", Prediction("valid, fine", "It opens.", 0.0, False, False, True))
    with pytest.raises(ConfigurationError, match="gave 1 facts after 1 steps"):
        experience.messages(TASK, [done], "look", ())
