# %% [markdown]
# # From traces to production
#
# Five walk-throughs on one small agent, `hotel.py`: an existing agent is warm-started before its deployment, with an experience model
# trained from its traces (1, 2) or a hosted one with a budget (3); a dream is followed by a few real steps (4); the policy is exported
# and put back into the graph (5). Each goes on from the first two, and runs on a CPU.
#
# With the environment variable `SMOKE=1` everything is as short as can be: each part is seen to work, and nothing is learned. What such
# a training comes to on a larger agent was measured in `../support_desk`.
#
# Needs `pip install 'dreamgym-lg[train,openai]'`. Start it in this folder.

# %%
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hotel import CITIES, ROOMS, bookings, graph
from langchain_core.messages import convert_to_openai_messages
from langchain_core.utils.function_calling import convert_to_openai_tool

from dreamgym_lg import AgentWorld, DreamGym, ReplayBuffer, Task, load_traces

SMOKE = bool(os.environ.get("SMOKE"))
OUT = Path(os.environ.get("OUT", "runs"))
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## What you have: an agent, its traces, a staging system
#
# The traces are conversations with their outcome, one a line. Here the production agent makes them: half of its bookings are guesses.
# `reset_real` gives each real episode fresh bookings (yours resets a staging database), `verify_real` asks them who got what.


# %%
@contextmanager
def reset_real(task):
    token = bookings.set([])
    try:
        yield
    finally:
        bookings.reset(token)


def verify_real(task, state):
    return float(bookings.get() == [ROOMS[task.metadata["city"]]])


def booking(city, split):
    return Task(id=city, instruction=f"A room in {city}.", environment="hotel", split=split, metadata={"city": city})


tools = [convert_to_openai_tool(tool) for tool in graph.nodes["tools"].bound.tools_by_name.values()]
with (OUT / "traces.jsonl").open("w") as file:
    for city in CITIES[:24]:
        task = booking(city, "train")
        with reset_real(task):
            state = graph.invoke({"messages": [("human", task.instruction)]})
            success = bool(verify_real(task, state))
        row = {"messages": convert_to_openai_messages(state["messages"]), "tools": tools, "success": success}
        file.write(json.dumps({**row, "metadata": {"city": city}}) + "\n")
held_out = [booking(city, "validation") for city in CITIES[24:28]] + [booking(city, "test") for city in CITIES[28:]]

# %% [markdown]
# ## 1. Warm-start an existing agent before its deployment
#
# The agent is named by where it is written, so its dreamed episodes run behind the wall. `train_base` imitates every recorded success.

# %%
settings = replace(AgentWorld.settings, policy_tokens=48, experience_tokens=128, experience_steps=120, iterations=10, real_budget=None)
if SMOKE:
    held_out = [held_out[0], held_out[-1]]
    settings = replace(
        settings,
        **dict(policy_tokens=32, experience_tokens=16, experience_steps=1, base_steps=1, batch_size=2, real_budget=0),
        **dict(iterations=1, num_tasks=1, num_generations=2, evaluate_tasks=1, max_false_success=None, max_gap=None),
    )


def create_gym(name, experience_model=None, **options):
    folder = OUT / name
    replay_buffer = ReplayBuffer(OUT / f"{name}.db")
    replay_buffer.extend(load_traces(OUT / "traces.jsonl", environment="hotel"))
    return DreamGym(
        "hotel.py:graph",
        replay_buffer=replay_buffer,
        experience_model=experience_model,
        tasks=[*replay_buffer.tasks(split="train"), *held_out],
        writes=["book"],
        reset_real=reset_real,
        verify_real=verify_real,
        out=folder,
        settings=settings,
        **options,
    )


gym = create_gym("local")
gym.train_base()

# %% [markdown]
# ## 2. An experience model from the traces
#
# Nothing leaves this machine: the experience model is trained from the same traces, its answers are grounded in them, and before the first
# iteration a gate asks what it would pay of episodes that must not be paid. Killed at any moment, the same lines go on.

# %%
gym.train_experience()
gym.train()
proof = gym.prove()
for policy, modes in proof["real"].items():
    print(policy, {mode: f"{found['successes']} of {found['episodes']}" for mode, found in modes.items()})

# %% [markdown]
# ## 3. A hosted experience model, with a budget
#
# Any chat model plays the tools. `Hosted` counts calls, tokens and money, remembers answers, and stops the run when the budget is spent:
# with a larger one, the same lines go on. For a provider's model give `init_chat_model("openai:gpt-5-mini", ...)` and its prices; here a
# small server on this machine answers in its place, and any OpenAI-compatible server of your own would.

# %%
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from langchain_openai import ChatOpenAI

from dreamgym_lg import ExperienceModel
from dreamgym_lg.errors import BudgetExceeded
from dreamgym_lg.experience.hosted import Hosted


class Provider(BaseHTTPRequestHandler):
    """Says of every action that it ends the episode without success."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        verdict = {"reasoning": "not as asked", "valid": True, "reward": 0, "terminated": True, "success": False}
        message = {"role": "assistant", "content": json.dumps({**verdict, "observation": ""})}
        usage = {"prompt_tokens": 900, "completion_tokens": 40, "total_tokens": 940}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
Thread(target=server.serve_forever, daemon=True).start()
model = ChatOpenAI(model="m", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="EMPTY", temperature=0, max_retries=0)


def train_hosted(max_cost):
    hosted = Hosted(OUT / "hosted-answers.db", prices=(1.0, 4.0), max_cost=max_cost)
    with ReplayBuffer(OUT / "hosted.db") as retrieved:
        experience = ExperienceModel(model, replay_buffer=retrieved, demonstrations=2, hosted=hosted)
        hosted_gym = create_gym("hosted", experience, policy=OUT / "local/models/base")
        try:
            hosted_gym.train(max_false_success=None)
        except BudgetExceeded as spent:
            print(spent)
    print(f"{hosted.usage.calls} calls, {hosted.usage.input_tokens} tokens read, {hosted.usage.cost:.4f} of {max_cost}")


train_hosted(max_cost=0.0001)
train_hosted(max_cost=1.0)
server.shutdown()

# %% [markdown]
# ## 4. Dream first, then a small real budget
#
# `s2r`: the iterations are dreamed; then training goes on with real episodes until `real_steps` of them are spent.

# %%
s2r = create_gym("s2r", OUT / "local/models/experience-0", policy=OUT / "local/models/base")
s2r.train(environment="s2r", real_steps=4 if SMOKE else 200)
real = [episode for episode in s2r.replay_buffer.trajectories(run=s2r.run_name("train")) if episode.source == "real"]
print(f"{sum(len(episode.steps) for episode in real)} real steps in {len(real)} episodes")

# %% [markdown]
# ## 5. Export, and back into production
#
# `export` writes a folder (weights, manifest, model card, a project for `langgraph dev`) and returns the graph with the policy in it.
# Elsewhere, `load_policy` checks the folder and loads it, and `with_policy` puts it into the graph; the tools are real again.

# %%
import shutil

from dreamgym_lg import load_policy, with_policy

shutil.rmtree(OUT / "exported", ignore_errors=True)
gym.export(OUT / "exported")
print(sorted(path.name for path in (OUT / "exported").iterdir()))

agent = with_policy(graph, load_policy(OUT / "exported", temperature=0))
with reset_real(None):
    print(agent.invoke({"messages": [("human", f"A room in {CITIES[-1]}.")]})["messages"][-1].text, bookings.get())

# %% [markdown]
# From here: `dreamgym serve runs/exported` serves it as an OpenAI-compatible server, `langgraph dev` in `runs/exported` serves the agent,
# and `dreamgym ui runs/local.db` shows what was played.
#
# <!-- canary: the exported policy on a share of the traffic belongs here, at the end -->
