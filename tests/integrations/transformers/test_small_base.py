"""The small base: what it is pretrained on, its tokenizer, its beginning, and the shipped files."""

import json
import re
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.small_base import SMALL_BASE
from dreamgym_lg.integrations.transformers.small_base.measure import KINDS, measure, probes
from dreamgym_lg.integrations.transformers.small_base.names import Conversation, Names, known_words
from dreamgym_lg.integrations.transformers.small_base.pretrain import (
    batches,
    create_copying_model,
    deepen,
    pretrain,
    random_spans,
)
from dreamgym_lg.integrations.transformers.small_base.skills import SKILLS, conversation, put_away
from dreamgym_lg.integrations.transformers.small_base.tool_skills import work_through
from dreamgym_lg.integrations.transformers.tool_parsing import Call, parse_reply

_PECKING_ORDER = (
    "apple avocado banana blueberry broccoli cabbage coconut cucumber eggplant grape grapefruit lime mango orange "
    "papaya peach pear pepper pineapple pomegranate potato pumpkin strawberry tomato watermelon"
)
PECKING_ORDER = _PECKING_ORDER.split()
_ALFWORLD = (
    "apple bread butterknife cabinet countertop creditcard desklamp drawer dresser fridge keychain lettuce microwave "
    "mug ottoman pan pencil pillow remotecontrol saltshaker shelf sinkbasin sofa spatula spoon statue toaster tomato "
    "vase"
)
ALFWORLD = _ALFWORLD.split()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SMALL_BASE)


@pytest.fixture(scope="module")
def made() -> list[Conversation]:
    return [conversation(i) for i in range(1500)]


def said(made: Conversation) -> str:
    return json.dumps([made.messages, made.tools])


_FIXED = (
    "yes no in the of is valid invalid reward continues success failure You see 0 1 The it reads writes refused error nothing "
    "wrong"
)
FIXED = set(_FIXED.split())
"""What a reply says besides what was said before."""

# --- What it is pretrained on ---------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_conversation_and_another_seed_another() -> None:
    assert conversation(7) == conversation(7) != conversation(8)


def test_no_name_of_a_world_is_in_the_words_or_in_what_is_said(made: list[Conversation]) -> None:
    textworld = pytest.importorskip("textworld_express")
    folds = json.loads(Path(textworld.__file__).with_name("twc_objects.folds.json").read_text())
    names = {name.lower() for fold in folds.values() for name in fold} | {*PECKING_ORDER, *ALFWORLD}
    assert len(names) > 100

    assert not names & set(known_words())
    found = re.compile(rf"\b({'|'.join(map(re.escape, names))})s?\b").findall(" ".join(map(said, made)).lower())
    assert found == []


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.__name__)
def test_every_reply_says_only_what_was_said_before(skill) -> None:
    """Of a list, a record or a call: each of its words and ids stands in the messages and tools before it."""
    for seed in range(200):
        rng = Random(seed)
        made = skill(rng, Names(rng))
        before = json.dumps(made.tools) if made.tools else ""
        replies = 0
        for message in made.messages:
            calls = message.get("tool_calls", [])
            if message["role"] == "assistant":
                replies += 1
                text = message["content"] + "".join(json.dumps(call["function"]["arguments"]) for call in calls)
                for word in re.findall(r"[\w#-]+", text):
                    assert word in FIXED or word.lower() in before.lower(), (word, made)  # "Press the ...": press
            before += " " + message["content"]
        assert replies


def test_a_call_names_an_offered_tool_and_gives_the_arguments_that_its_schema_requires(made: list[Conversation]) -> None:
    called = 0
    for each in made:
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in each.tools or ()}
        for call in (call["function"] for message in each.messages for call in message.get("tool_calls", ())):
            called += 1
            assert list(call["arguments"]) == offered[call["name"]]
    assert called > 100


def test_an_action_is_judged_by_what_is_still_there() -> None:
    """Replayed by hand: a thing that was taken, or was never listed, is invalid; the others are valid."""
    judged = {"valid": 0, "invalid": 0}
    (judge,) = (skill for skill in SKILLS if skill.__name__ == "judge")
    for seed in range(200):
        rng = Random(seed)
        messages = judge(rng, Names(rng)).messages
        listed, gone = messages[0]["content"].partition("> ")[0], set()
        for asked, answer in zip(messages[::2], messages[1::2], strict=True):
            thing = asked["content"].rpartition("> ")[2].split(" ", 1)[1]
            valid = thing not in gone and re.search(rf"(?<![\w-]){re.escape(thing)}(?![\w-])", listed) is not None
            verdict = re.split(r"\W", answer["content"])[0]
            assert (verdict == "valid") == valid, (asked, answer, listed)
            judged[verdict] += 1
            gone |= {thing} if valid else set()
    assert min(judged.values()) > 50


def test_things_are_put_away_once_each_and_only_those_that_lie_wrong() -> None:
    """Replayed by hand, from what is said."""
    moved = 0
    for seed in range(100):
        rng = Random(seed)
        messages = put_away(rng, Names(rng)).messages
        told = messages[0]["content"].replace("You may ", "")
        lies = {
            thing: place
            for place, things in re.findall(r" a ([^.]+) that contains ([^.]+)\.", told)
            for thing in things[2:].split(" and a ")
        }
        belongs = dict(re.findall(r"^([^:\n]+): (.+)$", told, re.M)) or dict(
            re.findall(r"The ([^.]+) belongs in the ([^.]+)\.", told)
        )
        acts = [message["content"] for message in messages[1::2]]
        done = [
            re.fullmatch(rf"\w+ {re.escape(taken.split(' ', 1)[1])} in (.+)", put)
            for taken, put in zip(acts[::2], acts[1::2], strict=True)
        ]
        things = [taken.split(" ", 1)[1] for taken in acts[::2]]
        assert len(things) == len(set(things)) and all(done)
        for thing, put in zip(things, done, strict=True):
            assert put is not None and put[1] == belongs[thing] != lies.get(thing)
            moved += 1
    assert moved > 150


def test_what_is_worked_through_follows_the_rules_for_each_record() -> None:
    """After each record comes the tool that its value asks for, on that thing; or none."""
    called = {True: 0, False: 0}
    for seed in range(100):
        rng = Random(seed)
        made = work_through(rng, Names(rng))
        field = re.search(r"Look at the (.+?) of each", made.messages[0]["content"])[1]  # type: ignore[index]
        order = made.messages[0]["content"].partition(" Say at the end")[0]
        calls = [message["tool_calls"][0]["function"] for message in made.messages if "tool_calls" in message]
        answers = [json.loads(message["content"]) for message in made.messages if message["role"] == "tool"]
        for at, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            if field in answer:
                then = calls[at + 1 : at + 2]
                rule = re.search(
                    rf"(?:(?<!\w){re.escape(answer[field])}: ([^ .]+)|If it is {re.escape(answer[field])}, (?:do )?([^ .]+))",
                    order,
                )
                assert rule is not None
                act = rule[1] or rule[2]
                follows = bool(then) and next(iter(then[0]["arguments"].values())) == next(iter(call["arguments"].values()))
                assert follows == (act != "nothing"), (made, at)
                assert not follows or then[0]["name"].startswith(act)
                called[follows] += 1
    assert min(called.values()) > 20


def test_names_that_are_easily_mistaken_are_different_ones() -> None:
    for seed in range(200):
        names = Names(Random(seed))
        names.alike_share = 0.9
        drawn = names.several(8)
        assert len({name.lower() for name in drawn}) == 8
        for name in drawn:
            assert not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", other) for other in drawn if other != name)


# --- Tokenizer and template -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quoastield", "W-20418", "ord_7f3a", "stray lampoon", "très bien, 料理"])
def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    ids = tokenizer.encode(name)

    assert tokenizer.decode(ids) == name
    for before, after in [("take ", "."), ("\n", "\n"), ('{"id": "', '"}'), ("a ", ", a"), ("<|user|>", "<|end|>")]:
        whole = tokenizer.encode(before + name + after)
        assert ids in [whole[i : i + len(ids)] for i in range(len(whole))], (before, after)


def test_a_rendered_call_is_read_as_it_was_meant(tokenizer: PreTrainedTokenizerFast, made: list[Conversation]) -> None:
    read = 0
    for each in (each for each in made if each.tools):
        text = tokenizer.apply_chat_template(each.messages, tools=each.tools, tokenize=False)
        names = frozenset(tool["function"]["name"] for tool in each.tools or ())
        replies = [parse_reply(reply.partition("<|end|>")[0], names) for reply in text.split("<|assistant|>")[1:]]
        meant = [call["function"] for message in each.messages for call in message.get("tool_calls", ())]
        assert [call for reply in replies for call in reply.calls] == [Call(c["name"], c["arguments"]) for c in meant]
        assert not any(reply.invalid for reply in replies)
        read += len(meant)
    assert read > 100


def test_what_is_forced_of_a_call_is_the_beginning_of_the_tokens_that_a_call_has(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = '<tool_call>\n{"name": "find_parcel", "arguments": {"parcel_id": "W-20418"}}\n</tool_call>'
    for forced in ['<tool_call>\n{"name": "find_parcel", "arguments":', '<tool_call>\n{"name": "']:
        given = tokenizer.encode(forced)
        assert tokenizer.encode(whole)[: len(given)] == given


# --- Pretraining ----------------------------------------------------------------------------------------------------


def test_before_any_training_the_model_goes_on_with_what_was_said_before() -> None:
    model, rng = create_copying_model(2048), Random(0)
    right = asked = 0
    for _ in range(8):
        told = torch.tensor([rng.randrange(10, 2048) for _ in range(100)])
        with torch.no_grad():
            said = model(input_ids=torch.cat([told, told])[None]).logits[0, 102:-1].argmax(-1)
        right, asked = right + int((said == told[3:]).sum()), asked + len(said)

    assert right / asked > 0.95


def test_a_deeper_model_says_the_same_before_it_is_trained() -> None:
    model, ids = create_copying_model(512), torch.randint(10, 512, (2, 40))
    deeper = deepen(model, 8)

    assert len(deeper.model.layers) == 8
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, deeper(input_ids=ids).logits, atol=1e-5)


def test_random_spans_are_learned_only_where_they_follow_from_what_was_said() -> None:
    for seed in range(50):
        ids, learned = random_spans(Random(seed), 2000)
        assert len(ids) == len(learned) and any(learned)
        for at in (i for i, wanted in enumerate(learned) if wanted):
            hint = ids[at - 2 : at]
            followed = [ids[i + 2] for i in range(at - 2) if ids[i : i + 2] == hint]
            assert ids[at] in followed


def test_batches_are_packed_with_whole_rows_and_are_the_same_for_the_same_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    def first() -> tuple[torch.Tensor, torch.Tensor]:
        return next(batches(tokenizer, tokens=1024, lengths=(512,), seed=3))

    ids, learned = first()
    assert ids.shape == learned.shape == (2, 512)
    assert torch.equal(ids, first()[0])
    assert not learned[ids == tokenizer.pad_token_id].any() and learned.any()


def test_pretraining_goes_on_from_a_folder_and_writes_one_that_answers(tmp_path: Path) -> None:
    pretrain(tmp_path, steps=2, tokens=1024, start=SMALL_BASE)

    policy = LocalChatModel.from_path(tmp_path, dtype="float32", temperature=0, max_new_tokens=8)
    assert policy.invoke("Repeat: brouncorn").text


# --- What is shipped ------------------------------------------------------------------------------------------------


def test_what_is_shipped_is_small_and_has_its_card() -> None:
    size = sum(path.stat().st_size for path in SMALL_BASE.iterdir())
    card = (SMALL_BASE / "README.md").read_text()

    assert size < 12e6
    assert all(kind in card for kind in KINDS)
    assert "small_base.pretrain" in card


def test_what_is_shipped_copies_names_that_it_has_never_seen() -> None:
    policy = LocalChatModel.from_path(SMALL_BASE, dtype="float32", temperature=0, max_new_tokens=32)

    named, _ = measure(policy, probes("one word", 10, 20))
    assert named >= 0.9
