"""The command line in this process, and settings so small that a whole run takes seconds."""

import socket

from typer.testing import CliRunner

from saccade import cli

WORLD = ["world.train=4", "world.validation=1", "world.test=2", "world.tasks_per_video=2"]
SFT = ["sft.steps=4", "sft.save_every=2", "sft.tokens_per_step=600", "sft.optim.warmup=1"]
RL = ["rl.steps=4", "rl.save_every=2", "rl.prompts=2", "rl.group=2"]
SMALL = [*WORLD, *SFT, *RL, "sampling.max_tokens=16", "evaluation.limit=4"]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def good(*arguments):
    done = run(*arguments)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


def bad(*arguments):
    """The one sentence of a command that fails."""
    done = run(*arguments)
    assert done.exit_code == 1, done.output + repr(done.exception)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.output
    return done.stderr


def free_port():
    """A port of 127.0.0.1 that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
