"""TRL's GRPO steps on a model folder, in an environment of its own; called by grpo_step.py.

Reads a line per step, and answers with a line of JSON: seconds by the clock and of CPU time of generation (with the
preprocessing of prompts and images, and the rewards) and of the rest of the step, and the token ids. Loading the
dataset's rows, logging and callbacks aren't counted.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def read_times() -> tuple[float, float]:
    """Return the clock's time and this process's CPU time, in seconds."""
    return time.perf_counter(), time.process_time()


class TimedTrainer(GRPOTrainer):
    """The trainer, with the times at which generation began and ended, and the token ids of the last step."""

    times: dict[str, tuple[float, float]]
    tokens: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.times = {"begun": read_times()}
        outputs = super()._generate_and_score_completions(inputs)
        self.times["generated"] = read_times()
        lengths = outputs["completion_mask"].sum(1).tolist()
        self.tokens = {"prompt": outputs["prompt_ids"][0].tolist(), "completion_lengths": lengths}
        return outputs


class Answer(TrainerCallback):
    """Waits for a request before each step, and answers it after the step."""

    trainer: TimedTrainer

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for a request; stop the training without one."""
        if not sys.stdin.readline():
            os._exit(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the times of the step."""
        begun, generated, ended = *self.trainer.times.values(), read_times()
        generation = [after - before for before, after in zip(begun, generated, strict=True)]
        training = [after - before for before, after in zip(generated, ended, strict=True)]
        figures = {"generation": generation, "training": training, **self.trainer.tokens}
        self._answers.write(json.dumps(figures) + "\n")
        self._answers.flush()


def alternate_rewards(completions: list[Any], **_: Any) -> list[float]:
    """Return 1 and 0 in turns, so that every advantage has a value."""
    return [float(index % 2) for index in range(len(completions))]


def main() -> None:
    """Answer requests until the input ends."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--prompt", type=Path, required=True, help="JSON: parts, each a text or a picture's file")
    for name in ("threads", "group", "new-tokens"):
        options.add_argument(f"--{name}", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    parts = json.loads(given.prompt.read_text())
    content = [{"type": part["type"], "text": part.get("text", "")} for part in parts]
    images = [Image.open(part["file"]).convert("RGB") for part in parts if part["type"] == "image"]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": content}], "images": images}])
    config = GRPOConfig(
        output_dir=str(given.prompt.parent / "trl"),
        max_steps=10**6,
        per_device_train_batch_size=given.group,
        num_generations=given.group,
        max_completion_length=given.new_tokens,
        generation_kwargs={"min_new_tokens": given.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    answer = Answer(answers)
    trainer = TimedTrainer(
        model=given.model, reward_funcs=alternate_rewards, args=config, train_dataset=rows, callbacks=[answer]
    )
    answer.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
