"""The command line: help with examples, and errors that say what to do."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamgym_lg.cli.app import app

runner = CliRunner()


@pytest.mark.parametrize("command", ["demo", "collect", "train", "eval", "report"])
def test_help_has_an_example(command: str) -> None:
    shown = runner.invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert f"dreamgym {command}" in shown.output


def test_an_unknown_game_names_the_nearest(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["demo", "--game", "peckingoder", "--out", str(tmp_path)])
    assert shown.exit_code == 2
    assert "Did you mean 'peckingorder'?" in shown.output


def test_a_folder_of_other_settings_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"game": "twc"}))
    shown = runner.invoke(app, ["collect", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 2
    assert "another" in shown.output and "game" in shown.output
    assert json.loads((tmp_path / "settings.json").read_text()) == {"game": "twc"}


def test_eval_and_report_need_what_comes_before(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["eval", "--quick", "--out", str(tmp_path / "new")])
    assert shown.exit_code == 2 and "dreamgym train" in shown.output
    shown = runner.invoke(app, ["report", str(tmp_path / "none")])
    assert shown.exit_code == 2 and "dreamgym eval" in shown.output


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "replay.db").write_bytes(b"this is no database, but long enough to be read as one" * 40)
    shown = runner.invoke(app, ["collect", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 2 and "replay.db" in shown.output
