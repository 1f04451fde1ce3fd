"""A real run's page in a real browser: no error, no request, no serious finding of axe, usable by keyboard."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.report.folders import make_run
from tests.small_mnist import small_mnist as small_mnist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540), pytest.mark.needs("chromium", "playwright")]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, small_mnist: Path) -> Path:
    """The page of a real run on two ranks."""
    folder = tmp_path_factory.mktemp("seen") / "run"
    words = ("train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", "2", "--strategy", "exact", "--steps", "12")
    more = ("--virtual-ranks", "4", "--eval-every", "4", "--run-dir", folder)
    for command in ((*words, *more), ("report", folder, "--explain")):
        done = warm.run(["-m", "paceline", *command], timeout=360)
        assert done.returncode == 0, done.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        yield started
        started.close()


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The page, and what went wrong while it was read from top to bottom."""
    wrong: list[str] = []
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else wrong.append(request.url),
    )
    page.goto(path.as_uri())
    for top in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"scrollTo(0, {top})")
        page.wait_for_timeout(40)
    page.wait_for_function("document.querySelectorAll('.plot:not(.drawn)').length == 0")
    return page, wrong


def background(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_page_is_whole_at_every_width_in_every_light(
    browser: Any, page_file: Path, width: int, scheme: str
) -> None:
    page, wrong = opened(browser, page_file, width, scheme)
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")
    assert [one["id"] for one in found["violations"] if one["impact"] in ("serious", "critical")] == []
    assert len(found["passes"]) > 20  # it has looked


def test_axes_theme_and_files_by_keyboard_alone(browser: Any, page_file: Path) -> None:
    page, wrong = opened(browser, page_file, 1440, "light")
    loss = page.locator("#figure-loss")
    before = background(page)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert background(page) != before
    loss.locator("button", has_text="steps").focus()
    page.keyboard.press("Space")
    assert loss.locator(".xtitle").text_content() == "steps"
    assert loss.locator("button", has_text="steps").get_attribute("aria-pressed") == "true"
    loss.locator("button", has_text="CSV").focus()
    with page.expect_download() as waited:
        page.keyboard.press("Enter")
    rows = Path(waited.value.path()).read_text().splitlines()
    assert rows[0].split(",")[3] == '"steps"'
    assert [row.split(",")[3] for row in rows[1:]] == [f'"{step}"' for step in range(1, 13)]
    assert wrong == []


def test_a_hostile_run_runs_nothing_in_the_page_nor_in_a_spreadsheet(browser: Any, tmp_path: Path) -> None:
    hosts = ("=1+cmd|' /C calc'!A0", "-1+1", "</script><img src=x onerror=console.log(1)>")
    folder = make_run(tmp_path / "run", ranks=3, hosts=hosts)
    assert warm.run(["-m", "paceline", "report", folder], torch=False).returncode == 0
    page, wrong = opened(browser, folder / "report.html", 1440, "light")
    with page.expect_download() as waited:
        page.locator("#figure-cores button", has_text="CSV").click()
    rows = Path(waited.value.path()).read_text().splitlines()
    assert {row[:3] for row in rows[1:]} == {"\"'=", "\"'-", '"</'}
    assert wrong == []
