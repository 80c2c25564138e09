"""The commands `dreamgym serve` and `dreamgym ui`, and the training graph of `langgraph dev`."""

import asyncio
import json
import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.runnables import RunnableConfig

from dreamgym_lg.cli.console import console, errors_shown, quiet_libraries, say
from dreamgym_lg.cli.experiment import open_experiment
from dreamgym_lg.errors import ConfigurationError, MissingDependency, ReplayBufferError
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.training import create_training
from dreamgym_lg.production.export import read_manifest
from dreamgym_lg.report.pages import check_installed

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What [b]dreamgym export[/b] has written.")],
    host: Annotated[str, typer.Option(help="Address; the default is reached from this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port it listens at.")] = 8000,
    device: Annotated[str, typer.Option(help="[b]auto[/b] (a GPU if there is one), [b]cpu[/b], [b]cuda:1[/b], ...")] = "auto",
) -> None:
    """Serve an exported policy as OpenAI's chat completions, tool calls included (transformers' own server).

    The folder's name is the model's: ChatOpenAI(model="mine", base_url="http://127.0.0.1:8000/v1", api_key="none").
    """
    with errors_shown():
        if "tinker" in (manifest := read_manifest(folder)):
            raise ConfigurationError(f"{folder} has no weights, which are on Tinker: load_policy(folder) samples them there")
        if "prompts" in manifest:
            raise ConfigurationError(f"{folder} holds prompts and no weights: `langgraph dev` in it serves the agent with them")
        quiet_libraries(offline=True)
        try:
            from transformers.cli.serve import Serve
            from transformers.cli.serving.model_manager import ModelManager
            from transformers.cli.serving.utils import BaseHandler
            from transformers.utils.import_utils import is_serve_available
        except ImportError as error:
            raise MissingDependency.extra((error.name or "transformers").partition(".")[0], "serve") from error
        if not is_serve_available():
            raise MissingDependency.extra("fastapi or uvicorn", "serve")
        from dreamgym_lg.integrations.transformers.loading import resolve_device
        from dreamgym_lg.report.server import listen

        resolve_device(device)  # report a wrong device now
        listen(host, port).close()  # report a taken port before the model is loaded
        if host not in _LOOPBACK:
            console.print(f"{host} is reached from outside, and the server asks nobody for a key", style="yellow")
        folder = folder.resolve()
        os.chdir(folder.parent)  # the server's name of a model is the path that it was given: from here, the folder's name
        # transformers would list the models in the hub's cache, and fail without a cache
        listed = {"id": folder.name, "object": "model", "created": int(folder.stat().st_mtime), "owned_by": "dreamgym-lg"}
        ModelManager.get_gen_models = staticmethod(lambda *_: [listed])
        BaseHandler.get_processor_inputs_from_messages = staticmethod(  # as `load_policy` and training render them
            partial(_with_text_of_calls, BaseHandler.get_processor_inputs_from_messages)
        )
        ModelManager._load_model = staticmethod(partial(_load_exported, folder, device))
        console.print(f"serving the model {folder.name} at http://{host}:{port}/v1", soft_wrap=True)
        template = manifest["sampling"].get("chat_template_kwargs")
        options: dict[str, Any] = {"chat_template_kwargs": json.dumps(template)} if template else {}
        Serve(force_model=folder.name, host=host, port=port, device=device, **options)


def _load_exported(folder: Path, device: str, *_: Any, **__: Any) -> Any:
    """The exported model. transformers finds no base of adapters that is named from their own folder."""
    from transformers import GenerationConfig

    from dreamgym_lg.integrations.transformers.loading import load_model

    model = load_model(folder, device=device)
    model.generation_config = GenerationConfig.from_pretrained(folder)  # under adapters it is the base's
    return model.eval()  # adapters are loaded to be trained: with dropout


def _with_text_of_calls(convert: Any, messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
    """Messages for the chat template, with the text beside tool calls, which transformers drops."""
    words = convert([{**each, "tool_calls": None} for each in messages], modality)
    return [{**each, "content": message["content"]} for each, message in zip(convert(messages, modality), words, strict=True)]


def ui(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A replay buffer, or the folder of an experiment.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes any free one.")] = 8321,
) -> None:
    """Show runs, curves, groups and episodes of a replay buffer in the browser. It is only read; a run may go on."""
    with errors_shown():
        check_installed("starlette", "uvicorn", "matplotlib", "jinja2", extra="ui")
        from dreamgym_lg.report.server import serve

        file = path / "replay.db" if path.is_dir() else path
        if path.is_dir() and not file.exists():
            raise ReplayBufferError(
                f"{path} holds no replay.db; give a replay buffer (a DreamGym's is the file that its ReplayBuffer names), or "
                "the folder of an experiment that has begun"
            )
        serve(file, port, say=lambda address: say(f"{address} shows {file}; Ctrl-C ends it"))


async def studio(config: RunnableConfig) -> Any:
    """The training graph that `langgraph.json` names for `langgraph dev`.

    Input: `{"run": "studio", "iterations": 2}`. Each thread trains its own policy in the dream of the experiment that
    $DREAMGYM_EXPERIMENT names, in the form of WORLD of `dreamgym train`. To draw the graph no experiment is needed.
    """
    return await asyncio.to_thread(_studio, str(config.get("configurable", {}).get("thread_id", "")))


@lru_cache(maxsize=2)
def _studio(thread: str) -> Any:
    from dreamgym_lg.graphs.training import Training, create_training_graph

    if not thread:
        drawn: Any = dict.fromkeys(("policy", "learner", "create_environment", "curriculum", "replay_buffer"))
        return create_training_graph(Training(source="synthetic", **drawn)).compile()
    if not (name := os.environ.get("DREAMGYM_EXPERIMENT")):
        raise ConfigurationError("DREAMGYM_EXPERIMENT names no experiment: give a world, FILE.py:NAME or a folder")
    work = open_experiment(name, existing=True)
    work.open()
    gate.check_truthful(work)
    create = work.create_learner
    training = create_training(
        work, work.base_policy(), lambda policy, path, s: create(policy, path.with_name(f"studio-{thread}"), s)
    )
    training.evaluate = None
    return create_training_graph(training).compile()
