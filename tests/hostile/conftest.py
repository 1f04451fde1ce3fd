"""Two users for these tests. Root only."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hostile.users import Users, two_users
from tests.small_mnist import small_mnist as small_mnist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.needs("useradd", "setpriv", "unshare"))


@pytest.fixture(scope="session")
def made_users() -> Iterator[Users]:
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("needs root and useradd")
    folder = Path(tempfile.mkdtemp(prefix="paceline-users-"))  # pytest's own folders are closed to others
    try:
        with two_users(folder) as users:
            yield users
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mnist(made_users: Users, small_mnist: Path) -> Path:
    """The small piece of MNIST, where all users can read it."""
    folder = made_users.place / "mnist"
    shutil.copytree(small_mnist, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture
def users(made_users: Users, request: pytest.FixtureRequest) -> Iterator[Users]:
    """The same two users, each with an empty home in a folder of this test."""
    place = Path(tempfile.mkdtemp(dir=made_users.place))
    place.chmod(0o755)
    homes: dict[str, Path] = {}
    for one in (made_users.victim, made_users.mallory, made_users.root):
        homes[one.name] = place / f"home-{one.name}"
        homes[one.name].mkdir(0o700)
        os.chown(homes[one.name], one.uid, one.gid)

    def at_home(one):
        return type(one)(one.name, one.uid, one.gid, homes[one.name])

    yield Users(at_home(made_users.victim), at_home(made_users.mallory), at_home(made_users.root), place)
    shutil.rmtree(place)
