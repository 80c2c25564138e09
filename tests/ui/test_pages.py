"""The pages of `dreamgym ui` over a small replay buffer: what they show, what they refuse, and that they change nothing."""

import os
import re
import shutil
import sqlite3
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("matplotlib")

from starlette.testclient import TestClient

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.errors import ConfigurationError, EpisodesMissing, ReplayBufferError
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.replay.reader import ReplayReader
from dreamgym_lg.report.server import create_app, serve
from dreamgym_lg.report.views import CHOICES, alarms, link
from dreamgym_lg.rollout import check_played
from dreamgym_lg.types import Step, Task, Trajectory

ATTACK_RUN = "<script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">\"'>{{ 7 * 7 }}"
PAGES = [
    "/",
    "/run?run=train",
    "/run?run=train&iteration=0",
    "/group?run=train&iteration=0&task_id=door/1",
    "/episodes",
    "/episode?id=1",
]
EVIL_PAGES = [
    "/",
    link("/run", run=ATTACK_RUN, iteration=0),
    link("/group", run=ATTACK_RUN, iteration=0, task_id=ATTACK_RUN),
    link("/episodes", text=ATTACK_RUN, run=ATTACK_RUN, task_id=ATTACK_RUN),
    "/episode?id=7",
    "/run?run=train",
    link("/run", run=f"no {ATTACK_RUN}"),
    link("/episodes", outcome=ATTACK_RUN),
    link("/episodes", **{ATTACK_RUN: "1"}),
]


class Parsed(HTMLParser):
    """A page's tags and its text, as a browser has them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += "" if tag in ("a", "b", "span") else " "

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def links(self) -> list[str]:
        return [str(attributes["href"]) for tag, attributes in self.tags if tag == "a"]


@pytest.fixture
def client(database: Path) -> TestClient:
    return TestClient(create_app(database), base_url="http://127.0.0.1:8321")


def shown(client: TestClient, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return Parsed(answer.text).text


def found(client: TestClient, **filters: object) -> list[int]:
    """The ids that the list of episodes shows."""
    answer = client.get(link("/episodes", **filters))
    assert answer.status_code == 200, answer.text
    return [int(id) for id in re.findall(r'href="/episode\?id=(\d+)"', answer.text)]


# --- what the pages show ------------------------------------------------------------------------------------------------------


def test_runs_with_their_success_the_newest_first(client: TestClient) -> None:
    text = shown(client, "/")
    assert "train dream 0.50 5 1 1 6" in text, "of the four that could be played"
    assert text.index("train dream") < text.index("offline recorded, real environment 1.00 1")


def test_an_unreadable_answer_is_no_success_as_in_an_evaluation(client: TestClient, database: Path) -> None:
    def dreamed(run: str, index: int, **outcome: Any) -> Trajectory:
        task = Task(id="door/1", instruction="Leave the house.", environment="house")
        return Trajectory(task=task, run=run, rollout_index=index, source="synthetic", **outcome)

    unreadable, whole = {"error": "PredictionFailed: no reward in 'hm'"}, {"success": True}
    episodes = [dreamed("evaluate", 0, **unreadable), dreamed("evaluate", 1, **whole)]
    assert sum(each.success for each in check_played(episodes)) / len(episodes) == 0.5
    alone = dreamed("unreadable", 0, **unreadable)
    with pytest.raises(EpisodesMissing):
        check_played([alone])
    with ReplayBuffer(database) as buffer:
        buffer.extend([*episodes, alone])
    assert "unreadable dream – 1 0 10 evaluate dream 0.50 2 0 9" in shown(client, "/")
    assert "dream: 0.50 success · 2 episodes" in shown(client, "/run?run=evaluate")
    assert "no success (unreadable answer)" in shown(client, "/episode?id=8")
    with ReplayBuffer(database) as buffer:
        buffer.add(dreamed("unanswered", 0, error="Unanswered: nothing in the dream answers get_order {}"))
    assert "no success (no answer in the dream)" in shown(client, "/episode?id=11")
    assert (found(client, outcome="no success"), found(client, outcome="failed")) == ([11, 10, 8, 4, 2], [7, 6])


def test_a_run_has_alarms_evaluations_and_curriculum(client: TestClient) -> None:
    text = shown(client, "/run?run=train")
    assert "iteration 2: KL of 0.90 a token, the policy is far from where it began" in text
    assert text.count("KL of") == 1, "told when it begins"
    assert "iteration 1: 1 episode could not be played, the first: <script>" in text
    assert "1 0.60 [0.31, 0.83] 0.80 [0.49, 0.94] +0.20" in text
    assert "1 dream 1 1 50% 0.210 1.00 2 1 –" in text, "iteration 1: one group, of a varied task, one failed"
    picture = client.get("/curves.png?run=train")
    assert picture.headers["content-type"] == "image/png" and picture.content.startswith(b"\x89PNG")


def test_an_alarm_tells_unreadable_answers_from_what_could_not_be_played() -> None:
    unreadable, first = "ended in an unreadable answer of the experience model", "the first: PredictionFailed: no reward"
    both, one = {"failed_episodes": 3, "unreadable_episodes": 2}, {"failed_episodes": 1, "unreadable_episodes": 1}
    assert alarms({at: row | {"first_error": "PredictionFailed: no reward"} for at, row in enumerate([both, one])}) == [
        (0, f"1 episode could not be played and 2 episodes {unreadable}, {first}"),
        (1, f"1 episode {unreadable}, {first}"),
    ]
    assert alarms({0: {"stopped_early": 1, "end_cause": "max_gap"}}) == [(0, "the run ended early: max_gap")]
    row = {"failed_episodes": 2, "unanswered_episodes": 1, "first_error": "Unanswered: x"}
    ended = "1 episode could not be played and 1 episode ended at a call that nothing in the dream answers"
    assert alarms({0: row}) == [(0, f"{ended}, the first: Unanswered: x")]


def test_the_address_of_the_curves_changes_with_the_figures(client: TestClient, database: Path) -> None:
    def address() -> str:
        return re.findall(r'src="(/curves[^"]+)"', client.get("/run?run=train").text)[0]

    before = address()
    assert address() == before
    with ReplayBuffer(database) as buffer:
        buffer.record_metrics("train", 4, {"train_success": 1.0})
    assert address() != before


def test_an_iteration_shows_its_groups(client: TestClient) -> None:
    text = shown(client, "/run?run=train&iteration=0")
    assert "1 of 3 succeed · rewards 0.00 1.00 0.50 · door/1" in text
    assert "1 of 2 succeed · rewards 1.00 0.00 · door/2 · varied" in shown(client, "/run?run=train&iteration=1")


def test_a_group_has_the_best_first(client: TestClient) -> None:
    text = shown(client, "/group?run=train&iteration=0&task_id=door/1")
    assert text.index("rollout 1 success") < text.index("rollout 2 no success") < text.index("rollout 0 no success")


def test_an_episode_shows_reasoning_who_decided_and_what_was_blocked_in_order(client: TestClient) -> None:
    text = shown(client, "/episode?id=4")
    opened, blocked, stuck = (
        text.index(each) for each in ("open door reward 0.50", "blocked: os.remove of orders.db", "fly reward")
    )
    assert opened < blocked < stuck
    assert "decided by the experience model The key fits, so it opens. The door is open." in text
    judged = "decided by a recorded answer judged by a recorded success's writing calls It was so before."
    assert judged in shown(client, "/episode?id=3")
    assert (
        "agent.py:12 in clean" in text and "invalid cut short decided by the tool's argument schema agent.py:7 in act" in text
    )
    assert "A key lies here." in shown(client, "/episode?id=3")
    assert "Could not be played to its end: ModelUnavailable: no answer" in shown(client, "/episode?id=6")


def test_a_conversation_reads_as_one_with_calls_between_and_the_hidden_goal_beside(database: Path, client: TestClient) -> None:
    goal = {"goal": "A refund <b>now</b>.", "facts": {"order": "W-204"}, "persona": "in a hurry"}
    task = Task(id="talk", instruction="My money back.", environment="desk", tools=[], goal=goal)
    first = {"observation": "My money back.", "action": render_answer("Which <i>order</i>?")}
    steps = [
        Step(**first, next_observation="W-204.", decided_by="user"),
        Step(observation="", action=render_call("refund", {"order": "W-204"}), next_observation="done", decided_by="recorded"),
        Step(observation="", action=render_answer("Done."), next_observation="", terminated=True, reward=1, judged_by="model"),
    ]
    fault = "UserFault: the user tells w999, which neither its goal nor the conversation holds"
    with ReplayBuffer(database) as buffer:
        lied = Trajectory(task=task, steps=steps[:2], source="synthetic", run="talk", error=fault, rollout_index=1)
        buffer.extend([Trajectory(task=task, steps=steps, source="synthetic", run="talk", success=True), lied])
    source = client.get("/episode?id=8").text
    text = Parsed(source).text
    said = [
        "My money back.",
        "Which <i>order</i>?",
        "W-204.",
        "done",
        "Done.",
        "What the user alone knows",
        "A refund <b>now</b>.",
    ]
    places = [text.index(each, text.index("What happened")) for each in said]
    assert places == sorted(places)
    assert "agent Which <i>order</i>?" in text and "user · the user W-204." in text
    assert "agent · reward 1.00 · judged by the experience model Done." in text and "order W-204" in text
    assert 'class="bubble agent"' in source and '{"answer"' not in source.replace("&#34;", '"')
    assert "no outcome (the user's fault)" in shown(client, "/episode?id=9")
    assert f"Ended by the dreamed user's fault, and taught nothing: {fault}" in shown(client, "/episode?id=9")
    assert "bubble" not in client.get("/episode?id=4").text


def test_every_link_of_every_page_leads_somewhere(client: TestClient) -> None:
    links = {each for page in PAGES for each in Parsed(client.get(page).text).links}
    assert len(links) > 15
    assert {each: client.get(each).status_code for each in links} == dict.fromkeys(links, 200)


# --- search and filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters, ids",
    [
        ({}, [7, 6, 5, 4, 3, 2, 1]),
        ({"run": "train"}, [6, 5, 4, 3, 2]),
        ({"run": "train", "iteration": 0}, [4, 3, 2]),
        ({"source": "offline"}, [1]),
        ({"split": "test"}, [7]),
        ({"outcome": "success"}, [5, 3, 1]),
        ({"outcome": "no success"}, [4, 2]),
        ({"outcome": "failed"}, [7, 6]),
        ({"happened": "invalid action"}, [4, 2]),
        ({"happened": "blocked"}, [4]),
        ({"happened": "raised"}, [7]),
        ({"happened": "passed through"}, []),
        ({"decided_by": "schema"}, [4, 2]),
        ({"decided_by": "recorded", "source": "synthetic"}, [5, 3]),
        ({"task_id": "door/2"}, [6, 5]),
        ({"text": "THE KEY FITS"}, [5, 4, 3, 1]),
        ({"text": "you are outside"}, [5, 3, 1]),
        ({"text": "no answer"}, [6]),
        ({"text": "orders.db"}, [4]),
        ({"text": "100%"}, [6, 5]),
        ({"text": "0_"}, []),
        ({"text": "%"}, [6, 5]),
        ({"before": 3}, [2, 1]),
    ],
)
def test_filters(client: TestClient, filters: dict[str, object], ids: list[int]) -> None:
    assert found(client, **filters) == ids


def test_the_form_shows_what_the_address_asks_for(client: TestClient) -> None:
    source = client.get(link("/episodes", run="train", iteration=0, outcome="no success", text='a "b"')).text
    assert 'value="a &#34;b&#34;"' in source and 'name="iteration" size="4" inputmode="numeric" value="0"' in source
    assert [each for each in re.findall(r"<option selected>([^<]+)", source)] == ["train", "no success"]


def test_every_choice_of_a_filter_is_one(client: TestClient) -> None:
    for name, values in CHOICES.items():
        for value in values:
            found(client, **{name: value})


def test_older_episodes_follow_until_all_are_seen(client: TestClient, database: Path) -> None:
    task = Task(id="many", instruction="", environment="e")
    with ReplayBuffer(database) as buffer:
        buffer.extend(Trajectory(task=task, run="many", rollout_index=index) for index in range(120))
    seen, address = [], "/episodes?run=many"
    while address:
        source = client.get(address).text
        seen += re.findall(r'href="/episode\?id=(\d+)"', source)
        following = re.findall(r'rel="next" href="([^"]+)"', source)
        address = following[0].replace("&amp;", "&") if following else ""
    assert [int(id) for id in seen] == list(range(127, 7, -1))


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address, status, message",
    [
        ("/nothing", 404, "Not Found"),
        ("/run?run=none", 404, "no run 'none' is stored"),
        ("/group?run=train&iteration=9&task_id=door/1", 404, "no episode of task 'door/1' is stored in iteration 9"),
        ("/episode?id=99", 404, "there is no episode '99'"),
        ("/episode", 404, "there is no episode ''"),
        ("/..%2f..%2freplay.db", 404, "Not Found"),
        ("/episode?id=x", 400, "id='x' is no number"),
        ("/episodes?iteration=-1", 400, "iteration='-1' is no number"),
        ("/episodes?before=99999999999999999999", 400, "is no number"),
        (
            "/episodes?outcome=sucess",
            400,
            "unknown outcome 'sucess'; known: failed, no success, success. Did you mean 'success'?",
        ),
        ("/episodes?colour=red", 400, "unknown filter 'colour'"),
        (f"/episodes?text={'a' * 201}", 400, "has 201 characters; give 200 at most"),
    ],
)
def test_a_wrong_address_is_told(client: TestClient, address: str, status: int, message: str) -> None:
    answer = client.get(address)
    assert answer.status_code == status and message in Parsed(answer.text).text


def test_nothing_but_reading_is_allowed(client: TestClient) -> None:
    assert {client.request(method, "/").status_code for method in ("POST", "PUT", "DELETE", "PATCH")} == {405}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8321", ""])
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/episode?id=1", headers={"host": host}).status_code == 400
    assert client.get("/episode?id=1", headers={"host": "localhost:8321"}).status_code == 200


@pytest.mark.parametrize("address", [*PAGES, "/style.css", "/live.js", "/stamp", "/nothing", "/episode?id=x"])
def test_every_answer_allows_no_script_in_a_page_and_nothing_from_outside(client: TestClient, address: str) -> None:
    answer = client.get(address)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["x-content-type-options"] == "nosniff"
    assert not re.findall(r"(?:src|href|action)=\"(?!/|#)", answer.text), "nothing is fetched from elsewhere"


@pytest.mark.parametrize("address", EVIL_PAGES)
def test_what_a_trace_says_is_text(client: TestClient, address: str) -> None:
    answer = client.get(address)
    page = Parsed(answer.text)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"src": "/live.js", "defer": None}]
    assert all(attributes["src"].startswith("/curves.png") for tag, attributes in page.tags if tag == "img")  # type: ignore[union-attr]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "style"]
    assert "<script>document.title" in page.text, "shown as it is"
    assert "'>49" not in page.text


def test_half_an_emoji_in_metadata_fails_no_page(client: TestClient, database: Path) -> None:
    half = "\ud83d"
    task = Task(id="half", instruction=half, environment="e", metadata={half: [half]})
    with ReplayBuffer(database) as buffer:
        buffer.add(Trajectory(task=task, steps=[step_of(half)], run="half"))
    changed(database, """UPDATE tasks SET metadata = '{"k": "\\ud83d"}' WHERE instruction = '?'""")  # of an earlier release
    for address in ("/", "/episodes", "/episode?id=8", link("/run", run="half", iteration=0), link("/episodes", text=half)):
        assert client.get(address).status_code == 200, address
    assert '"k": "?"' in shown(client, "/episode?id=8")


def step_of(text: str) -> Step:
    return Step(observation=text, action=text, next_observation=text, reasoning=text)


# --- the file -----------------------------------------------------------------------------------------------------------------


def test_the_file_is_never_written_to(client: TestClient, database: Path) -> None:
    before = database.read_bytes()
    for address in PAGES:
        assert client.get(address).status_code == 200
    assert database.read_bytes() == before
    with ReplayReader(database) as reader, pytest.raises(ReplayBufferError, match="readonly"):
        reader._rows("DELETE FROM metrics", ())


def test_a_buffer_in_a_folder_that_nobody_may_write_to_is_shown(database: Path) -> None:
    """As on a read-only mount. Root may write everywhere: a child without its rights reads."""
    with TemporaryDirectory() as folder:
        shutil.copy(database, Path(folder) / "replay.db")
        os.chmod(folder, 0o555)
        if (child := os.fork()) == 0:
            try:
                with suppress(PermissionError):
                    os.setuid(65534)
                with ReplayReader(Path(folder) / "replay.db") as reader:
                    os._exit(0 if reader.runs() else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert [each.name for each in Path(folder).iterdir()] == ["replay.db"]


def test_what_a_run_stores_is_shown_at_once(client: TestClient, database: Path) -> None:
    with ReplayBuffer(database) as buffer:  # stays open, as a run that goes on
        stamp = client.get("/stamp").text
        assert client.get("/stamp").text == stamp
        buffer.add(Trajectory(task=Task(id="new", instruction="Just now.", environment="e"), run="newest"))
        assert client.get("/stamp").text != stamp
        assert "newest" in shown(client, "/") and "Just now." in shown(client, "/episode?id=8")


def test_a_buffer_behind_a_link_is_shown_with_what_a_run_has_just_stored(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite keeps it in a log beside the file itself."""
    (linked := tmp_path / "linked").mkdir()
    (linked / "replay.db").symlink_to(database)
    client = TestClient(create_app(linked / "replay.db"), base_url="http://localhost")
    with ReplayBuffer(database) as buffer:
        stamp = client.get("/stamp").text
        buffer.add(Trajectory(task=Task(id="new", instruction="Just now.", environment="e"), run="stored just now"))
        assert client.get("/stamp").text != stamp
        monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only mount
        assert "stored just now" in shown(client, "/")


def locked(path: Path) -> sqlite3.Connection:
    """Held exclusively until it is closed."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def changed(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(b""), "is empty; give the replay buffer of a run that has begun"),
        (lambda path: path.write_text("no database " * 100), "file is not a database"),
        (lambda path: path.write_text("x"), "file is not a database"),
        (
            lambda path: changed(path, "UPDATE _sqlite_migrations SET name = '0099_later' WHERE name = '0012_goal'"),
            "was made by a newer dreamgym-lg (it has migration '0099_later') and was left as it is; upgrade with: pip",
        ),
        (
            lambda path: changed(path, "DELETE FROM _sqlite_migrations WHERE name = '0012_goal'"),
            "was made by an earlier dreamgym-lg (it lacks migration '0012_goal') and is only read here; bring it up to date: ",
        ),
        (
            lambda path: (path.unlink(), changed(path, "PRAGMA journal_mode = WAL")),
            "is empty; give the replay buffer of a run that has begun",
        ),
        (
            lambda path: (path.unlink(), changed(path, "CREATE TABLE cats (name TEXT)")),
            "is another application's SQLite file",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_the_fix(client: TestClient, database: Path, spoil, message: str) -> None:
    for beside in ("-wal", "-shm"):
        database.with_name(f"{database.name}{beside}").unlink(missing_ok=True)
    spoil(database)
    answer = client.get("/")
    text = Parsed(answer.text).text
    assert answer.status_code == 503 and message in text and "replay.db" in text
    with pytest.raises(ReplayBufferError, match="replay.db"):
        serve(database, 0, say=pytest.fail)


def test_a_locked_file_is_told(client: TestClient, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.replay.schema._READER_BUSY_SECONDS", 0.01)
    holder = locked(database)
    answer = client.get("/")
    assert answer.status_code == 503 and "replay.db is locked: another process keeps it to itself" in Parsed(answer.text).text
    holder.close()
    assert client.get("/").status_code == 200, "the page is there again without a restart"


def test_a_port_that_is_taken_is_told(database: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="give another --port"):
        serve(database, taken.getsockname()[1], say=pytest.fail)


def test_what_a_signal_ended_is_an_interrupt(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn raises the signal again as a rule."""
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    with pytest.raises(KeyboardInterrupt):
        serve(database, 0, say=lambda address: None)
