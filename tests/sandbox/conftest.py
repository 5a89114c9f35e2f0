"""Fork servers for the sandbox tests, each started once: with all isolation layers, and with some disabled."""

import pytest

from saccade.sandbox import ForkServerClient

DISABLED_LAYERS = {"all layers": (), "no namespaces": ("namespaces",)}


@pytest.fixture(scope="session")
def servers():
    """A function that starts a server once per set of disabled layers."""
    started = {}

    def get_server(*disabled_layers):
        if disabled_layers not in started:
            started[disabled_layers] = ForkServerClient.start(disabled_layers=disabled_layers)
        return started[disabled_layers]

    yield get_server
    for server in started.values():
        server.close()


@pytest.fixture(scope="session")
def server(servers):
    return servers()


@pytest.fixture(params=DISABLED_LAYERS)
def any_server(request, servers):
    return servers(*DISABLED_LAYERS[request.param])
