"""Trackers: what TensorBoard's own reader finds in the event files of a run that was killed, and which names are refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.experiment import trackers
from dreamgym_lg.experiment.trackers import ExperimentTrackers, check_trackers


def read_events(folder: Path) -> dict[str, dict[int, float]]:
    """Each figure by step, as TensorBoard shows them."""
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_a_killed_run_goes_on_in_tensorboard_at_its_step(tmp_path: Path) -> None:
    first = ExperimentTrackers(["tensorboard"], tmp_path, {"learner": "grpo", "beta": None, "seed": 1})
    for iteration in range(3):
        first.log(iteration, {"dream/success": iteration / 4})
    first.close()
    second = ExperimentTrackers(["tensorboard"], tmp_path, {})
    second.log(2, {"dream/success": 1.0})  # killed before its checkpoint: played again
    second.log(3, {"dream/success": 1.0, "validation/gap": 0.5})
    second.close()
    found = read_events(tmp_path)
    assert found["dream/success"] == {0: 0, 1: 0.25, 2: 1, 3: 1} and found["validation/gap"] == {3: 0.5}
    assert len(list((tmp_path / "tensorboard").rglob("hparams.yml"))) == 1, "the settings are shown once"


@pytest.mark.parametrize(("first", "shown"), [("tensorboard", [{"seed": 1}]), ("wandb", [{"seed": 1}, {"seed": 1}])])
def test_a_tracker_that_is_added_later_gets_the_settings_too(
    first: str, shown: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[object]()
    double = SimpleNamespace(start=lambda: None, log=lambda *_, **__: None, finish=lambda: None)
    double.store_init_configuration = told.append
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", lambda **_: double)
    for names in ([first], ["tensorboard", "wandb"]):
        each = ExperimentTrackers(names, tmp_path, {"seed": 1})
        each.log(0, {"dream/success": 1.0})
        each.close()
    assert told == shown and len(list((tmp_path / "tensorboard").rglob("hparams.yml"))) == 1


def test_nothing_is_written_without_a_tracker(tmp_path: Path) -> None:
    none = ExperimentTrackers(check_trackers("none"), tmp_path, {})
    none.log(0, {"dream/success": 1.0})
    none.close()
    assert list(tmp_path.iterdir()) == []


def test_names_are_checked_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_trackers(["tensorboard", "tensorboard"]) == ("tensorboard",)
    with pytest.raises(ConfigurationError, match="unknown tracker in report_to= 'tensorbord'.* Did you mean 'tensorboard'"):
        check_trackers("tensorbord")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="report_to='wandb' needs the package wandb; run: pip install wandb"):
        check_trackers(["wandb"])
