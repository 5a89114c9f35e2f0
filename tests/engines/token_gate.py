"""A gate that holds the replies of a fake server after some tokens, until the test has changed something."""

import math


class TokenGate:
    """Limits replies to `limit` tokens each until a test raises the limit.

    `sampled` has the number of tokens of each reply, in the order in which the replies started. The server holds its
    `condition` whenever it calls `start`, `has_passed` or `count`.
    """

    def __init__(self, condition, limit):
        self.condition, self.limit, self.sampled = condition, limit, []

    def start(self):
        """Count a new reply; return its index."""
        self.sampled.append(0)
        return len(self.sampled) - 1

    def has_passed(self, reply):
        """Return whether a reply may sample another token."""
        return self.sampled[reply] < self.limit

    def count(self, reply):
        """Count one more token of a reply."""
        self.sampled[reply] += 1

    def open(self, limit=math.inf):
        """Let every reply continue up to `limit` tokens."""
        with self.condition:
            self.limit = limit
            self.condition.notify_all()
