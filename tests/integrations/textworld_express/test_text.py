"""The split of TextWorld-Express's worlds, and checks of actions, without Java."""

import pytest

from dreamgym_lg.integrations.text_games.game import split_of
from dreamgym_lg.integrations.textworld_express.text import check_action


@pytest.mark.parametrize("game", ("peckingorder", "twc"))
def test_without_a_described_room_forms_and_names_are_known(game: str) -> None:
    seen = ["A brown hat, dirty gray shoes and a shelf."]
    refused = ["take brown shoes", "take shoe", "fly", "put hat", "put brown hat on shelf", "put hat in wardrobe", ""]
    assert [action for action in refused if check_action(game, action, seen) is None] == []
    for action in ("take brown hat", "take shoes", "put brown hat in shelf", "look around", " inventory "):
        assert check_action(game, action, seen) is None


def test_split_shares() -> None:
    splits = [split_of(f"world {number}") for number in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17 and 0.08 < splits.count("validation") / 4000 < 0.12
