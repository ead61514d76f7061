"""Pages and pictures in a real browser, where one is installed: they load from a file and complain of nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, started
from helpers import run

RANK = ("-m", "llama3-70b", "--gpus", "16", "--objective", "throughput", "--max-tpot", "40")
READY = "document.documentElement.dataset.ready"
COLUMN = (
    "(() => {{ const head = [...document.querySelectorAll('#ranking thead th')]; const at = head.findIndex(h => "
    "h.dataset.name === '{0}'); return [...document.querySelectorAll('#ranking tbody tr')].map(r => "
    "r.cells[at].dataset.v ?? ''); }})()"
)
SORTED = "document.querySelector('#ranking thead th[data-name={0}]').getAttribute('aria-sort')"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of a ranking, one of an explanation, and a placement."""
    folder = tmp_path_factory.mktemp("made")
    files = ("--html", folder / "rank.html", "--placement-svg", folder / "placement.svg")
    assert run(*RANK, "--quiet", *files).status == 0
    assert run("explain", "-m", "llama3-8b", "--gpus", "2", "--quiet", "--html", folder / "explain.html").status == 0
    return folder


def check_quiet(browser: Browser, path: Path) -> None:
    """Nothing was asked for but the file, and the console is empty."""
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("name", ["rank.html", "explain.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_loads_from_a_file_and_asks_for_nothing(browser: Browser, made: Path, name: str, dark: bool) -> None:
    browser.open(made / name, dark=dark)
    assert browser.ask(READY) == "yes"
    check_quiet(browser, made / name)
    ground, text = browser.ask(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (brightness(ground) < brightness(text)) == dark
    browser.open(made / name, width=380, dark=dark)
    assert browser.ask(FITS)


def brightness(colour: str) -> int:
    """Of `rgb(1, 2, 3)`."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_a_click_on_a_heading_sorts_and_another_turns_it_round(browser: Browser, made: Path) -> None:
    browser.open(made / "rank.html")
    before = browser.ask(COLUMN.format("memory_gib"))
    browser.click("#ranking th[data-name=memory_gib] button")
    assert browser.ask(SORTED.format("memory_gib")) == "ascending"
    found = browser.ask(COLUMN.format("memory_gib"))
    assert found == sorted(before, key=float) != before
    assert browser.ask("document.activeElement.tagName") == "BUTTON"
    browser.press("Enter", "\r")
    assert browser.ask(SORTED.format("memory_gib")) == "descending"
    assert browser.ask(COLUMN.format("memory_gib")) == found[::-1]
    browser.click("#ranking th[data-name=plan] button")
    assert browser.ask(SORTED.format("memory_gib")) is None
    plans = browser.ask(COLUMN.format("plan"))
    assert plans[0] == "TP2xDP8"
    assert plans.index("TP4xPP4") < plans.index("TP8xDP2") < plans.index("TP16")
    check_quiet(browser, made / "rank.html")


def test_empty_cells_stay_last(browser: Browser, made: Path) -> None:
    browser.open(made / "rank.html")
    for order in ("ascending", "descending"):
        browser.click("#times-ttft thead th:last-child button")
        assert browser.ask("document.querySelector('#times-ttft th:last-child').getAttribute('aria-sort')") == order
        found = browser.ask(
            "[...document.querySelectorAll('#times-ttft tbody tr')].map(r => r.cells[5].dataset.v ?? '')"
        )
        figures = [float(text) for text in found if text]
        assert found[len(figures) :] == [""] * (len(found) - len(figures)) != []
        assert figures == sorted(figures, reverse=order == "descending")


def test_columns_come_and_go(browser: Browser, made: Path) -> None:
    browser.open(made / "rank.html")
    head = "document.querySelector('#ranking th[data-name=tp]').offsetParent !== null"
    assert browser.ask(head) is False
    browser.click(".columns summary")
    browser.ask(
        "[...document.querySelectorAll('.columns label')].find(l => l.textContent === 'TP, chips').id = 'tp-box'"
    )
    browser.click("#tp-box")
    assert browser.ask(head) is True


def test_points_say_their_figures(browser: Browser, made: Path) -> None:
    browser.open(made / "rank.html")
    browser.middle("#frontier .first")
    browser.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    browser.hover("#frontier .first")
    assert browser.ask("document.getElementById('tip').hidden") is False
    best = run(*RANK, "--csv", "-", "--top", "1").rows[0]
    assert browser.ask("document.getElementById('tip').textContent").startswith(
        f"{best['plan']}, load {best['concurrency']}\n"
    )
    browser.ask("document.getElementById('frontier').focus()")
    browser.press("ArrowRight")
    fastest = run(*RANK, "--pareto", "--csv", "-", "--top", "1").rows[0]
    assert browser.ask("document.getElementById('tip').textContent").startswith(f"{fastest['plan']}, load ")
    browser.click(".key button[data-plan='0']")
    assert browser.ask("document.querySelector('#frontier .same').getAttribute('d').length") > 10
    check_quiet(browser, made / "rank.html")


def test_a_box_leaves_only_what_nobody_measured(browser: Browser, made: Path) -> None:
    browser.open(made / "rank.html")
    rows = "[...document.querySelectorAll('#facts tbody tr')].filter(r => r.offsetParent !== null)"
    assert browser.ask(f"{rows}.length") > 50
    browser.click("#only")
    assert 0 < browser.ask(f"{rows}.length") < 40
    assert browser.ask(f"{rows}.every(r => r.querySelector('.unsure'))")


def test_the_placement_opens_and_no_text_leaves_its_picture(browser: Browser, made: Path) -> None:
    browser.open(made / "placement.svg")
    check_quiet(browser, made / "placement.svg")
    outside = browser.ask(
        "(() => { const all = document.documentElement.getBoundingClientRect(); return [...document.querySelectorAll("
        "'text')].filter(t => { const b = t.getBoundingClientRect(); return b.left < all.left || b.right > all.right "
        "|| b.top < all.top || b.bottom > all.bottom; }).map(t => t.textContent); })()"
    )
    assert outside == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.svg", ("sweep", "-m", "llama3-8b", "--gpus", "1,2,4")),
        ("a.png", ("compare", "TP2", "DP2", "-m", "llama3-8b")),
    ],
)
def test_plots_open(browser: Browser, name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / name
    assert run(*words, "--quiet", "--plot", target).status == 0
    browser.open(target)
    check_quiet(browser, target)
    if name.endswith(".png"):
        wide, high = struct.unpack(">II", target.read_bytes()[16:24])
        assert browser.ask("[document.images[0].naturalWidth, document.images[0].naturalHeight]") == [wide, high]
    else:
        assert browser.ask("document.querySelectorAll('text').length") > 5
