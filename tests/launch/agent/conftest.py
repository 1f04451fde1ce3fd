"""`launch`, for the tests of this room."""

from tests.launch.launch_fixture import launch as launch
