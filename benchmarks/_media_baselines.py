"""Pick frames of a video with decord or OpenCV, in an environment of their own; called by media.py.

Reads one request per line (JSON: side, path, times, width, height, threads, and a file for the frames, if they are
wanted), and answers with a line: seconds by the clock and of CPU time, of this process. Importing isn't counted.
"""

import json
import sys
import time

import cv2
import decord
import numpy as np


def pick_with_decord(path: str, times: list[float], width: int, height: int, threads: int) -> list[np.ndarray]:
    """Open the file, find the frames by their timestamps, decode them in one call, scale them (bicubic)."""
    reader = decord.VideoReader(path, num_threads=threads)
    starts = reader.get_frame_timestamp(range(len(reader)))[:, 0]
    numbers = [max(0, int(np.searchsorted(starts, time + 1e-3, side="right")) - 1) for time in times]
    frames = reader.get_batch(numbers).asnumpy()
    return [cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC) for frame in frames]


def pick_with_opencv(path: str, times: list[float], width: int, height: int, threads: int) -> list[np.ndarray]:
    """Open the file, seek to each frame by its number, decode it, scale it (bicubic)."""
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, threads])
    rate, frames = capture.get(cv2.CAP_PROP_FPS), []
    for time_ in times:
        capture.set(cv2.CAP_PROP_POS_FRAMES, round(time_ * rate))
        is_read, frame = capture.read()
        assert is_read, f"no frame at {time_} s"
        scaled = cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC)
        frames.append(cv2.cvtColor(scaled, cv2.COLOR_BGR2RGB))
    return frames


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        pick = {"decord": pick_with_decord, "OpenCV": pick_with_opencv}[request["side"]]
        cv2.setNumThreads(request["threads"])
        arguments = [request[name] for name in ("path", "times", "width", "height", "threads")]
        begun = time.perf_counter(), time.process_time()
        frames = pick(*arguments)
        seconds = time.perf_counter() - begun[0], time.process_time() - begun[1]
        if request.get("save_to"):
            np.save(request["save_to"], np.stack(frames))
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
