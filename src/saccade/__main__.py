"""`python -m saccade` is `saccade`, also for `torchrun -m saccade`."""

from saccade.cli.app import main

if __name__ == "__main__":
    main()
