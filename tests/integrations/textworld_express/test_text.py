"""The split of TextWorld-Express's worlds, without Java."""

from dreamgym_lg.integrations.textworld_express import text


def test_split_shares() -> None:
    splits = [text.world_split(f"world {number}") for number in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17 and 0.08 < splits.count("validation") / 4000 < 0.12
    assert text.world_split("a  world\n") == text.world_split(" a world")
