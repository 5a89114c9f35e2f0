"""What every test shares: passive threads before torch comes in."""

from saccade.cli import calm_threads

calm_threads()
