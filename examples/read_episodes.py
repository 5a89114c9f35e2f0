"""Read the episodes of an evaluation: how they ended, and one of them token by token.

`python examples/read_episodes.py RUN [EVALUATION]` reads `RUN/evaluations/EVALUATION.jsonl` (default: `test`).
"""

import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import saccade


def print_episode(episode: saccade.Episode, indent: str = "") -> None:
    """Print the turns of an episode, its sub-agents' episodes, and the segments of its ledger."""
    print(f"{indent}{episode.environment}: {episode.task.question} -> {episode.answer} ({episode.status})")
    for turn in episode.turns:
        print(f"{indent}  reply: {' '.join(turn.reply.text.split())[:90]}")
        for call, result in zip(turn.reply.calls, turn.results, strict=False):
            print(f"{indent}  {call.name or 'malformed call'} -> {(result.error or result.text)[:90]}")
    for segment in episode.ledger.segments:
        logprobs = f", mean logprob {fmean(segment.logprobs):.2f}" if segment.is_sampled else ""
        print(f"{indent}  {segment.origin}: {len(segment.tokens)} tokens, {len(segment.slots)} images{logprobs}")
    for child in episode.children:
        print_episode(child, indent + "    ")


def main(run: Path, name: str = "test") -> list[saccade.Episode]:
    """Print a summary of the episodes and the one that looked most often; return them all."""
    scored = saccade.read_episodes(run, name=name)
    episodes = [each.episode for each in scored]
    print(f"{len(scored)} episodes, mean reward {fmean(each.score.value for each in scored):.2f}")
    print("ended:", ", ".join(f"{status} {count}" for status, count in Counter(e.status for e in episodes).items()))
    print("tool results:", Counter("ok" if result.ok else "error" for e in episodes for result in e.results))
    print_episode(max(episodes, key=lambda episode: len(episode.results)))
    return episodes


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
