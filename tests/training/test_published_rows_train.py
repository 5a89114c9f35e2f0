"""Rows of both published families, images with Python and videos with crops, train a tiny model in one run."""

import asyncio
import json

import numpy as np
import pytest
from commands import good
from PIL import Image
from published_rows import PARAVT_SYSTEM, PYVISION_PROMPT, PYVISION_RL_ROWS
from published_variants import (
    ANSWER,
    BOXED,
    CROP,
    LOOK,
    build_paravt,
    build_paravt_rl,
    build_pyvision,
    respond,
    write_code,
    write_result,
)

from saccade import sandbox
from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.synthetic.video_writer import write_video
from saccade.models.tiny import make_tiny_model
from saccade.runs import pipeline
from saccade.training import rl

PIXELS = {"image_pixels": [256, 1024], "frame_pixels": [256, 1024], "max_context_tokens": 4096, "num_frames": 4}
PYTHON = {
    "max_tool_turns": 2,
    "system_prompt_source": "row",
    "final_answer_prompt": "",
    "tools": {"python": {"timeout": 60.0}},
}
ENVIRONMENTS = {
    "default": {"name": "tool_calling", "settings": {**PIXELS, "system_prompt_source": "row", "force_think": True}},
    "pyvision_gym_w_image_hint": {"name": "python", "settings": {**PIXELS, **PYTHON}},
    "pyvision_gym_wo_image_hint": {"name": "python", "settings": {**PIXELS, **PYTHON, "image_in_prompt": False}},
    "pyvision_gym_wo_video_hint": {"name": "python", "settings": {**PIXELS, **PYTHON}},
}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the rows' media, import demonstrations and tasks of both families, and merge them; return the folder."""
    folder = tmp_path_factory.mktemp("rows")
    write_video(folder / "video.mp4", np.full((32, 32, 32, 3), 90, np.uint8), 2.0)
    Image.new("RGB", (40, 20), "red").save(folder / "image.png")
    Image.new("RGB", (36, 36), "blue").save(folder / "figure.png")
    shown, printed = (write_code("plt.show()"), write_result("", [1])), (write_code("print(3)"), write_result("3"))
    hidden = {"env_name": "pyvision_gym_wo_image_hint", "prompt": "How many discs does image_clue_0 show?"}
    film = {"images": (), "videos": ["video.mp4"], "env_name": "pyvision_gym_wo_video_hint", "prompt": "How many?"}
    python_rows = [
        build_pyvision(*shown, *printed, BOXED, images=("image.png", "figure.png")),
        build_pyvision(*printed, BOXED, **hidden),
        build_pyvision(*printed, BOXED, **film),
    ]
    crop_rows = [build_paravt(LOOK + CROP + CROP, respond("Red.", "Blue."), ANSWER), build_paravt(ANSWER)]
    task_rows = [{**row, "prompt": [{"role": "system", "content": "Use Python."}, *row["prompt"]]}
                 for row in PYVISION_RL_ROWS.values()]  # fmt: skip
    choice = build_paravt_rl(answer="B", question_type="mcq")
    for name, importer, rows, settings in (
        ("python", "pyvision_sft", python_rows, ["environments=env_name"]),
        ("crops", "paravt_sft", crop_rows, []),
        ("python_tasks", "pyvision_rl", task_rows, ["environments=env_name", "use_prompt=true"]),
        ("crop_tasks", "paravt_rl", [choice], []),
    ):
        source = write_rows(folder / f"{name}.rows.jsonl", rows)
        good("data", "import", importer, source, *settings, "--out", folder / f"{name}.jsonl")
    for split in ("train", "validation", "test"):
        for name, parts in (("demonstrations", ("python", "crops")), ("tasks", ("python_tasks", "crop_tasks"))):
            files = [folder / f"{part}.jsonl" for part in parts]
            good("data", "import", "tasks", *files, "--out", folder / "data" / split / f"{name}.jsonl")
    return folder / "data"


@pytest.mark.slow
def test_mixed_rows_train(data, tmp_path):
    default = ENVIRONMENTS["default"]
    named = {name: config for name, config in ENVIRONMENTS.items() if name != "default"}
    recipe = load_recipe(
        "tiny/para_grpo",
        [
            "model.num_threads=1",
            "sampling.max_tokens=24",
            "sft={steps: 3, tokens_per_step: 1500, save_every: 3, optim: {warmup_steps: 1}, auxiliary_fraction: 0}",
            "rl={steps: 1, prompts_per_step: 4, group_size: 2, filters: {reward_std: null}}",
            "frame_budgets=[4]",
        ],
    )
    values = {**recipe.model_dump(), "environment": {**recipe.model_dump()["environment"], **default}}
    recipe = type(recipe).model_validate({**values, "environments": named})
    demonstrations = load_demonstrations(data / "train/demonstrations.jsonl")
    replies = sorted({text for demonstration in demonstrations for text in demonstration.replies})
    make_tiny_model(str(tmp_path / "model"), hidden_size=64, num_layers=1, vocabulary_text=replies)
    folder = tmp_path / "run"
    recipe = pipeline.with_paths(recipe, folder=folder, model=tmp_path / "model", data=data)
    checkpoint = pipeline.run_sft(folder, recipe, on_step=lambda *_: None)
    assert json.loads((folder / "demonstration_check.json").read_text()) == {"rows": 5, "rejected": {}}
    components, rows, episodes = pipeline.load_training_components(recipe, checkpoint), [], {}

    async def train():
        try:
            await rl.train(
                components,
                load_tasks(data / "train/tasks.jsonl"),
                folder=tmp_path / "rl",
                log_step=rows.append,
                on_groups=lambda step, groups: episodes.update(
                    {
                        member.episode.task.environment: member.episode
                        for group in groups
                        for member in group.scored_episodes
                    }
                ),
            )
        finally:
            await components.engine.close()

    try:
        asyncio.run(train())
    finally:
        sandbox.close_shared_servers()
    assert [row["frac_errors"] for row in rows] == [0]
    assert rows[0]["engine_trainer_logprob_diff_max"] < 1e-4
    shown = {name: [slot.image.path for slot in episode.ledger.segments[0].slots] for name, episode in episodes.items()}
    assert {name: len(paths) for name, paths in shown.items()} == {
        None: 4,  # frames of the overview
        "pyvision_gym_w_image_hint": 1,
        "pyvision_gym_wo_image_hint": 0,
        "pyvision_gym_wo_video_hint": 0,
    }
    decode = components.vlm.renderer.decode
    prompts = {name: decode(episode.ledger.segments[0].tokens) for name, episode in episodes.items()}
    for name, prompt in prompts.items():
        system = PARAVT_SYSTEM if name is None else "Use Python."
        assert prompt.count(system) == 1, name
        assert prompt.count("<|im_start|>system") == 1, name
        assert name is None or PYVISION_PROMPT in prompt, name
