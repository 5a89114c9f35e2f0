"""Zygotes for all tests of the sandbox, each started once: the best this machine offers, and with walls left out."""

import pytest

from saccade.tools._sandbox.server import Server

WALLS = {"all walls": (), "no namespaces": ("namespaces",)}


@pytest.fixture(scope="session")
def servers():
    """Starts a server once per set of walls that is left out."""
    started = {}

    def get(*without):
        if without not in started:
            started[without] = Server.start(without=without)
        return started[without]

    yield get
    for server in started.values():
        server.close()


@pytest.fixture(scope="session")
def server(servers):
    return servers()


@pytest.fixture(params=WALLS)
def any_server(request, servers):
    return servers(*WALLS[request.param])
