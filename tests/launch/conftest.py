"""The fixtures of this room."""

from tests.launch.launch_fixture import forked as forked
from tests.launch.launch_fixture import launch as launch
