"""The book: every page has its place, and the site is whole by itself, without a network."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests import warm

from paceline.config.strategies import STRATEGY_INFO

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHAPTERS = [DOCS / "ladder" / f"{name}.md" for name in STRATEGY_INFO]
ASKS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}
VARIES = re.compile(r"[\d,]+ samples/s|(?<=loss )\d+\.\d+|(?<=weights )\w{16}|-\d{8}-\d{6}")
LOSS = re.compile(r"^test after step \d+: loss (\S+)$", re.MULTILINE)
LAST_DIGIT, OTHER_PROCESSOR = 1.5e-4, 1e-3  # differences of the losses by rounding
LOOKED_AT = [  # by axe: the pages that a new user reads, and the kinds of tables and code that there are
    "install", "start/first-run", "start/gpus", "recipes", "hugging-face", "from-lightning", "ci", "launch/kubernetes",
    "existing-script", "gpu", "support", "ladder/ddp",
]  # fmt: skip
COLORFUL = ["recipes", "gpu", "ladder/ddp"]  # with code, commands, differences of files, and links in code
HARMLESS = {"canonical", "prev", "next"}  # links that a browser does not follow by itself


def leaves(node: Any) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from leaves(child)


@pytest.fixture(scope="module")
def navigation() -> list[str]:
    import yaml

    found = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    return [page for page in found if not page.startswith("source/")]


@pytest.mark.needs("yaml")
def test_every_page_has_one_place_in_the_book(navigation: list[str]) -> None:
    assert sorted(navigation) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.needs("yaml")
def test_the_index_says_the_same_order_as_the_book(navigation: list[str]) -> None:
    linked = re.findall(r"\]\(([^)#\s]+\.md)\)", (DOCS / "README.md").read_text())
    assert ["README.md", *(page for page in linked if not page.startswith(".."))] == navigation


@pytest.mark.needs("yaml")
def test_the_ladder_is_climbed_in_the_order_of_its_table(navigation: list[str]) -> None:
    chapters = [str(path.relative_to(DOCS)) for path in CHAPTERS]
    assert [page for page in navigation if page.startswith("ladder/")] == chapters


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_its_code_its_command_its_table_and_a_place_for_its_picture(chapter: Path) -> None:
    text = chapter.read_text()
    assert re.search(rf"<!-- (diff|code) .*?/{chapter.stem}\.py", text)
    run = re.search(
        r"<!-- transcript ladder-" + chapter.stem + r" -->\n```text\n\$ (.*)\n(?:.*\n)*?.*weights \w{16}", text
    )
    assert run
    assert f"--strategy {chapter.stem}" in run[1] or chapter.stem == "bucketed"  # the default
    assert chapter.stem == "dp" or "<!-- measured ladder" in text  # dp needs several GPUs
    assert f"<!-- picture ladder-{chapter.stem}.svg" in text


def test_the_runs_of_the_ladder_have_one_loss_and_those_that_promise_it_the_same_bits() -> None:
    texts = {chapter.stem: chapter.read_text() for chapter in CHAPTERS}
    losses = {name: [*map(float, LOSS.findall(text))] for name, text in texts.items()}
    expected = pytest.approx(losses["single"], abs=LAST_DIGIT)
    assert all(losses[name] == expected for name in STRATEGY_INFO if name != "exact"), losses
    digests = {*re.findall(r"^weights (\w{16})", texts["exact"] + texts["zero"], re.M)}
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_a_chapter_says_what_the_program_prints(tmp_path: Path) -> None:
    (command, said) = re.findall(r"```text\n\$ paceline (train .*)\n((?:.*\n)*?)```", CHAPTERS[2].read_text())[0]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = warm.run(["-m", "paceline", *shlex.split(command)], cwd=tmp_path)
    printed = [VARIES.sub("#", line) for line in done.stdout.replace(str(tmp_path), "/home/me/project").splitlines()]
    expected = [
        VARIES.sub("#", line) for line in said.splitlines() if re.match(r"/home|global|\d+ samples|test|done|we", line)
    ]
    assert len(expected) > 6
    assert [line for line in expected if line not in printed] == []
    expected_losses = pytest.approx([*map(float, LOSS.findall(said))], abs=OTHER_PROCESSOR)
    assert [*map(float, LOSS.findall(done.stdout))] == expected_losses


def test_every_picture_is_shown_somewhere() -> None:
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
    unseen = [path.name for path in (DOCS / "pictures").glob("*") if f"pictures/{path.name}" not in pages]
    assert unseen == []


def test_every_column_of_a_table_has_a_name() -> None:
    unnamed = [
        f"{page.relative_to(ROOT)}: {head}"
        for page in DOCS.rglob("*.md")
        for head in re.findall(r"^(\|.*\|)\n\|(?:\s*:?-+:?\s*\|)+$", page.read_text(), re.MULTILINE)
        if re.search(r"\|\s*\|", head)
    ]
    assert unnamed == []


def test_a_place_for_a_picture_is_filled_once_there_is_one(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; import includes; includes.DOCS = Path(sys.argv[1]); includes.main([])"
    (tmp_path / "pictures").mkdir()
    (tmp_path / "ladder").mkdir()
    picture = tmp_path / "pictures" / "one.svg"
    picture.write_text("<svg/>")
    page = tmp_path / "ladder" / "page.md"
    page.write_text("<!-- picture one.svg Title -->\n<!-- end -->\n<!-- picture two.svg None -->\n<!-- end -->\n")
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT / "tools", check=True)
    assert f"-->\n\n![Title](../pictures/{picture.name})\n\n<!-- end" in page.read_text()
    assert "two.svg)" not in page.read_text()


class Page(HTMLParser):
    """What a page of the site asks a browser to load, where its links lead, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.unsaid: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See the class."""
        has = dict(attrs)
        self.anchors |= {has.get("id") or "", has.get("name") or ""}
        if tag == "a":
            self.links.append(has.get("href") or "")
        if tag == "img" and not has.get("alt"):
            self.unsaid.append(has.get("src") or "")
        if tag in ASKS and (address := has.get(ASKS[tag])) and not HARMLESS & {*(has.get("rel") or "").split()}:
            self.asked.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, built as `make docs` does it."""
    folder = tmp_path_factory.mktemp("book") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=165)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
@pytest.mark.needs("mkdocs", "material")
def test_every_page_is_built_and_can_be_searched(site: Path, pages: dict[Path, Page]) -> None:
    for page in DOCS.rglob("*.md"):
        built = page.relative_to(DOCS).with_suffix(".html")
        assert site / (built.with_stem("index") if built.stem == "README" else built) in pages
    index = json.loads((site / "search" / "search_index.js").read_text().removeprefix("var __index = "))
    assert {"ladder/zero.html", "reference/settings.html"} <= {entry["location"] for entry in index["docs"]}


@pytest.mark.slow
@pytest.mark.needs("mkdocs", "material")
def test_no_page_asks_the_network_for_anything(site: Path, pages: dict[Path, Page]) -> None:
    asked = {address for page in pages.values() for address in page.asked}
    assert len(asked) > 5
    assert [address for address in asked if urlsplit(address).netloc] == []
    styles = "\n".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//[^)]*", styles) == []


@pytest.mark.slow
@pytest.mark.needs("mkdocs", "material")
def test_every_link_leads_to_a_place_in_the_book(site: Path, pages: dict[Path, Page]) -> None:
    lost = list[str]()
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                parts.fragment and target in pages and parts.fragment not in pages[target].anchors
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
        assert page.unsaid == [], f"{path.name}: a picture without words"
    assert lost == []


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.needs("mkdocs", "material", "playwright", "chromium")
def test_a_browser_without_a_network_shows_and_searches_it(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    wrong = list[str]()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        page.on("request", lambda asked: asked.url.startswith(("file:", "data:", "blob:")) or wrong.append(asked.url))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for name in ("index", "ladder/exact", "reference/commands", "launch/troubleshooting"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.keyboard.press("/")
        page.keyboard.type("virtual ranks", delay=20)
        page.locator("a.md-search-result__link[href*='virtual']").first.wait_for(timeout=30_000)
        browser.close()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.needs("mkdocs", "material", "playwright", "axe_playwright_python", "chromium")
def test_pages_are_accessible_and_fit_a_phone(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    part = "{include: [['article'], ['.md-search']]}"
    look = f"rules => axe.run({part}, {{resultTypes: ['violations'], preload: false, rules}})"
    wrong = list[str]()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        for scheme, name in [("slate", name) for name in LOOKED_AT] + [("default", name) for name in COLORFUL]:
            media = "dark" if scheme == "slate" else "light"
            page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=media)
            page.goto((site / f"{name}.html").as_uri())
            width, used = page.evaluate("[document.documentElement.scrollWidth, document.body.dataset.mdColorScheme]")
            assert width <= 390 and used == scheme, name
            page.evaluate(axe)
            contrast = {"color-contrast": {"enabled": name in COLORFUL}}  # slow, and alike on all pages
            for found in page.evaluate(look, contrast)["violations"]:
                wrong += [f"{name}: {found['id']}: {node['html'][:99]}" for node in found["nodes"]]
            page.close()
        browser.close()
    assert wrong == []
