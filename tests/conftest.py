"""Set before anything is imported; pyproject.toml's pytest options close the network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",  # a model or data set that is not on disk is an error, not a download
    TOKENIZERS_PARALLELISM="false",  # no warning when a test starts a process
    OMP_WAIT_POLICY="PASSIVE",  # idle torch threads sleep: two cores are shared with the test itself
)


@pytest.fixture(scope="session")
def prepared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--quick` run up to its models: collected, experience model and base policy trained, nothing dreamed yet."""
    from dreamgym_lg.demo import Demo
    from dreamgym_lg.recipe import settings_for

    out = tmp_path_factory.mktemp("prepared") / "run"
    work = Demo(out, settings_for("peckingorder", quick=True, seed=3))
    work.collect()
    work.train_models()
    work.replay_buffer.close()
    return out


@pytest.fixture(scope="session")
def finished_run(prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run after `dreamgym demo --quick`, as a user would start it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(prepared_run, out)
    command = [sys.executable, "-m", "dreamgym_lg.cli", "demo", "--quick", "--seed", "3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "outcome" in done.stdout
    return out
