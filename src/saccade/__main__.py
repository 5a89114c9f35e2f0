"""The entry point of `saccade`, and of `python -m saccade` and `torchrun -m saccade`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while its modules are being imported."""
    try:
        from saccade.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
