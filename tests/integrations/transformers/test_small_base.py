"""The small base: the files that are shipped."""

from random import Random

import pytest
from tiny_models import SMALL_BASE
from transformers import AutoTokenizer

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

SYLLABLES = ["bround", "claim", "drield", "flance", "gryle", "plurk", "quoast", "sheep", "skorn", "strick", "thoom", "xern"]


def test_it_is_small_and_its_card_names_the_commit_that_made_it() -> None:
    assert sum(path.stat().st_size for path in SMALL_BASE.iterdir()) < 12e6
    assert "commit 7ebb123" in (SMALL_BASE / "README.md").read_text()


@pytest.mark.parametrize("name", ["quoastield", "W-20418", "ord_7f3a", "stray lampoon", "très bien, 料理"])
def test_a_name_is_the_same_tokens_wherever_it_stands(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMALL_BASE)
    ids = tokenizer.encode(name)
    assert tokenizer.decode(ids) == name
    for before, after in [("take ", "."), ("\n", "\n"), ('{"id": "', '"}'), ("a ", ", a"), ("<|user|>", "<|end|>")]:
        whole = tokenizer.encode(before + name + after)
        assert ids in [whole[i : i + len(ids)] for i in range(len(whole))], (before, after)


def test_it_copies_names_that_it_has_never_seen() -> None:
    policy = LocalChatModel.from_path(SMALL_BASE, dtype="float32", temperature=0, max_new_tokens=32)
    rng = Random(0)
    lists = [["".join(rng.choice(SYLLABLES) for _ in range(2)) for _ in range(10)] for _ in range(20)]
    prompts = [f"You see {', '.join(f'a {name}' for name in names)}.\nYour task is to take the {names[6]}." for names in lists]
    copied = [names[6] in reply.text for names, reply in zip(lists, policy.batch(prompts), strict=True)]
    assert sum(copied) >= 18
