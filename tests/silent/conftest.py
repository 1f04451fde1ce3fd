"""`launch`, for the tests in this folder."""

from tests.launch.launch_fixture import launch as launch
