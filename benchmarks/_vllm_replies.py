"""Replies of vLLM to prompts with pictures, in an environment of its own; called by local_engine.py.

Reads one request per line (JSON: a file of prompts, the number of new tokens, whether to sample greedily, ids that are
never sampled), and answers with a line: seconds by the clock and of CPU time, of this process and all that it started,
the ids of the prompts as vLLM expanded them, and the logprobs of the replies. vLLM's engine runs in this process,
without a server. Its caches are cleared before each request, as after an update of the weights; that and reading the
file isn't counted.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import psutil

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def read_times() -> tuple[float, float]:
    """Return the clock's time and the CPU time of this process and its descendants, in seconds."""
    process = psutil.Process()
    cpu_times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return time.perf_counter(), sum(each.user + each.system for each in cpu_times)


def main() -> None:
    """Answer requests until the input ends."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    for name in ("threads", "rows", "frames", "max-model-len"):
        options.add_argument(f"--{name}", type=int, required=True)
    given = options.parse_args()
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(given.threads))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import numpy as np
    import torch
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        given.model,
        dtype="float32",
        max_model_len=given.max_model_len,
        max_num_seqs=given.rows,
        limit_mm_per_prompt={"image": given.frames, "video": 0},
        skip_mm_profiling=True,  # of the largest image that the model allows
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    assert torch.get_num_threads() == given.threads
    for line in sys.stdin:
        request = json.loads(line)
        with np.load(request["prompts"]) as file:
            ids, pixels = file["ids"].tolist(), file["pixels"]
        prompts: list[Any] = [
            {"prompt_token_ids": row, "multi_modal_data": {"image": [Image.fromarray(frame) for frame in frames]}}
            for row, frames in zip(ids, pixels, strict=True)
        ]
        sampling = SamplingParams(
            temperature=0.0 if request["is_greedy"] else 1.0,
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            logit_bias=dict.fromkeys(request.get("forbidden_ids", ()), -100.0) or None,
        )
        llm.reset_prefix_cache()
        llm.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
        begun = read_times()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = [after - before for before, after in zip(begun, read_times(), strict=True)]
        replies = [output.outputs[0] for output in outputs]
        logprobs = [
            [values[token].logprob for token, values in zip(reply.token_ids, reply.logprobs or (), strict=True)]
            for reply in replies
        ]
        answer = {"seconds": seconds, "prompts": [output.prompt_token_ids for output in outputs], "logprobs": logprobs}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
