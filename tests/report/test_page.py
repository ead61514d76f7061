"""The page of a ranking and of an explanation: it holds what was found, escapes everything, and asks nobody."""

from __future__ import annotations

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import CONFIGS, run
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.layers import Structure
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.report.page.facts import UNSURE, facts
from planner.report.page.frontier import MOST_TICKS, Axis
from planner.report.page.markup import Markup, element, escaped
from planner.report.page.ranked import heading
from planner.report.page.seating import SHADES, seating_file
from planner.request import Request
from planner.results import COLUMNS
from planner.specs.catalog import load_machine, load_model
from planner.specs.workload import Workload

RANK = ("-m", "llama3-70b", "--gpus", "16", "--objective", "throughput", "--max-tpot", "40")
EXPLAIN = ("explain", "-m", "llama3-8b", "--gpus", "2")
EVIL = "<script>alert('\"&1')</script>"
VOID = {"meta", "link", "input", "br", "col"}


class Page(HTMLParser):
    """What a browser would make of a page, as far as tests ask: elements, cells of tables, texts outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = dict(attrs).get("id") or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts.append(data)
            return
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[self._table][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(tmp_path: Path, *words: object) -> Page:
    target = tmp_path / "a.html"
    done = run(*words, "--quiet", "--html", target)
    assert (done.status, done.err) == (0, "")
    return Page(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page(tmp_path_factory.mktemp("ranking"), *RANK)


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page(tmp_path_factory.mktemp("explained"), *EXPLAIN)


def test_a_page_has_every_plan_with_its_figures_and_every_refusal(ranking: Page) -> None:
    found = ranking
    rows = run(*RANK, "--top", "0", "--csv", "-").rows
    head, *body = found.tables["ranking"]
    assert len(body) == len(rows) > 10
    assert [row[1] for row in body] == [row["plan"] for row in rows]
    figures = {name: float(rows[0][name]) for name in ("ttft_ms", "tpot_ms", "tokens_per_s", "memory_gib")}
    shown = dict(zip(head, body[0], strict=True))
    for name, value in figures.items():
        text = next(cell for words, cell in shown.items() if words == heading(name).replace(", ", ""))
        assert float(text) == pytest.approx(value, rel=1e-3)
    refused = [row for row in run(*RANK, "--rejected", "--top", "1", "--csv", "-").rows if row["error"]]
    assert [row[0] for row in found.tables["refusals"][1:]] == [row["plan"] for row in refused]
    assert [row[2] for row in found.tables["refusals"][1:]] == [row["error"] for row in refused]


def test_every_column_of_the_results_is_reached(ranking: Page) -> None:
    found = ranking
    everything = " ".join([found.text, *found.tables["ranking"][0]])
    for name in COLUMNS:
        words, _, unit = heading(name).partition(", ")
        assert words in everything, name
        assert unit in everything, name


def test_sentences_are_those_of_the_table(ranking: Page) -> None:
    found = ranking
    told = " ".join(run(*RANK).out.split())
    best = re.search(r"TP\w+ comes first: .*? a token\)\.", told)
    assert best is not None
    assert best[0] in found.text
    assert "Sensitivity at these loads" in found.text
    assert "plan --model llama3-70b --gpus 16 --objective throughput --max-tpot 40" in found.text


@pytest.mark.parametrize("name", ["ranking", "explained"])
def test_nothing_is_asked_of_any_network(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(name)
    for tag, attributes in found.elements:
        for key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "style"):
            value = attributes.get(key) or ""
            assert value.startswith("#") or value == "" or (tag, value) == ("link", "data:,"), (tag, key, value)
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        assert not any(name.startswith("on") for name in attributes)
    for text in found.scripts:
        assert not re.search(r"https?:|@import|url\(|fetch|XMLHttp|WebSocket|\bimport\b|eval|innerHTML", text)
    policy = next(attributes["content"] for _, attributes in found.elements if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_what_a_file_calls_itself_is_text_everywhere(tmp_path: Path) -> None:
    text = (CONFIGS / "models" / "llama3-8b.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("name:", "aliases:", "hf_ids:"))]
    odd = tmp_path / "<script>x&.yaml"
    odd.write_text("\n".join([f"name: {json.dumps(EVIL)}", *lines]), encoding="utf-8")
    ours = tmp_path / '"><script>.yaml'
    ours.write_text(f"extends: h100-sxm\nname: {json.dumps('</script><b>' + EVIL)}\n", encoding="utf-8")
    plain = page(tmp_path, "-m", "llama3-8b", "-H", "h100-sxm", "--gpus", "2")
    found = page(tmp_path, "-m", odd, "-H", ours, "--gpus", "2")
    assert EVIL in found.text
    names = [tag for tag, _ in found.elements]
    assert names.count("script") == [tag for tag, _ in plain.elements].count("script")
    assert "b" not in {tag for tag, _ in found.elements} - {tag for tag, _ in plain.elements}
    picture = tmp_path / "a.svg"
    assert run("-m", odd, "-H", ours, "--gpus", "2", "--quiet", "--placement-svg", picture).status == 0
    assert any(EVIL in (node.text or "") for node in ElementTree.parse(picture).iter())
    assert EVIL in page(tmp_path, "explain", "-m", odd, "-H", ours, "--gpus", "2", "--plan", "TP2").text


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_as_it_was(text: str) -> None:
    clean = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
    found = ElementTree.fromstring(element("text", text, name=text))
    assert (found.text or "").replace("\r", "\n") == clean.replace("\r\n", "\n").replace("\r", "\n")
    assert not {"<", ">", '"', "'"} & set(escaped(text))


def test_markup_is_taken_as_it_is_and_nothing_else() -> None:
    assert element("p", Markup("<b>x</b>"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"
    assert (
        element("input", type="checkbox", checked=True, hidden=False, id=None) == '<input type="checkbox" checked="">'
    )


@settings(deadline=None)
@given(st.floats(0.01, 1e6), st.floats(1.0, 1e4))
def test_ticks_lie_within_the_axis_and_in_order(low: float, ratio: float) -> None:
    axis = Axis.of([low, low * ratio], 0.0, 100.0)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= MOST_TICKS + 1
    places = [axis.at(value) for value in ticks]
    assert places == sorted(places)
    assert places[0] >= -1e-6
    assert places[-1] <= 100 + 1e-6


def test_the_same_question_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        assert run("-m", "llama3-8b", "--gpus", "2", "--quiet", "--html", tmp_path / name).status == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "llama3-8b", "-H", "tpu-v5e", "--gpus", "4", "--slice", "2x2", "--pareto", "--max-tpot", "12.5"),
        ("explain", "-m", "llama3-8b", "--tp", "1,2", "--gpus", "2", "--price", "3", "--prefix-hit", "0.5"),
    ],
)
def test_the_command_on_a_page_makes_that_page(words: tuple[str, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    assert run(*words, "--quiet", "--html", first, "--csv", tmp_path / "a.csv").status == 0
    text = first.read_text(encoding="utf-8")
    asked = re.search("<code>(.*?)</code>", text)
    assert asked is not None
    program, *typed = shlex.split(html.unescape(asked[1]))
    assert program == "plan"
    assert not {"--html", "--quiet", "--csv"} & set(typed)
    assert run(*typed, "--quiet", "--html", second).status == 0
    assert second.read_text(encoding="utf-8") == text


def test_answers_of_one_token_have_no_picture_and_pareto_has_no_winner(tmp_path: Path) -> None:
    found = page(tmp_path, "-m", "llama3-8b", "--gpus", "2", "--osl", "1")
    assert "Answers of one token have no TPOT" in found.text
    assert "frontier" not in [attributes.get("id") for _, attributes in found.elements]
    frontier = page(tmp_path, "-m", "llama3-8b", "--gpus", "2", "--pareto")
    assert "Pareto: no other plan has both" in frontier.text
    assert "first" not in [attributes.get("class") for _, attributes in frontier.elements]


def test_an_explanation_has_its_items_changes_and_rival(explained: Page) -> None:
    found, told = explained, run(*EXPLAIN).out
    for name in ("times-ttft", "times-tpot"):
        assert all(row[0] in told for row in found.tables[name][1:])
    shares = [float(row[2].rstrip("%")) for row in found.tables["times-tpot"][1:]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    shares = [float(row[2].rstrip("%")) for row in found.tables["memory-table"][1:]]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert len(found.tables["effects"]) > 10
    assert "Against DP2" in found.text
    assert len(found.tables["difference"]) > 5


def test_the_assumed_never_looks_like_the_measured(ranking: Page) -> None:
    found = ranking
    status = [row[3] for row in found.tables["facts"][1:]]
    assert {"fitted", "stated", "! assumed"} <= set(status)
    for word in status:
        assert word.startswith("! ") == (word.removeprefix("! ") in UNSURE)
    badges = [
        attributes["class"] for tag, attributes in found.elements if attributes.get("class") in ("sure", "unsure")
    ]
    assert [badge == "unsure" for badge in badges] == [word.startswith("! ") for word in status]


def test_a_model_of_which_nothing_was_verified_says_so_of_every_fact() -> None:
    for name, expected in (("command-r-plus", {"unverified"}), ("llama3-70b", {"stated"})):
        model, (machine, engine) = load_model(name), load_machine("h100", None)
        request = Request(model, machine, engine, 8, Workload())
        setting = setting_of(request, Placement.of(machine, 8), Structure())
        shapes = [fact.status for fact in facts(request, setting.formats) if fact.part == "model"]
        assert set(shapes[:10]) == expected


@pytest.mark.parametrize(
    ("option", "name", "sentence"),
    [
        ("--html", "a.txt", "--html a.txt: expected the name of a file that ends in .html"),
        ("--html", "-", "--html -: expected the name of a file that ends in .html"),
        ("--html", "", "--html: expected the name of a file"),
        ("--html", "none/a.html", "no such file or directory"),
        ("--placement-svg", "a.png", "--placement-svg a.png: expected the name of a file that ends in .svg"),
    ],
)
@pytest.mark.parametrize("words", [RANK, ("explain", "-m", "llama3-8b")])
def test_files_that_cannot_be_made_are_refused_at_once(
    words: tuple[str, ...], option: str, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words, option, name)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert list(tmp_path.iterdir()) == []


def test_no_output_is_an_input_or_another_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*RANK, "--html", "a.html", "--csv", "./a.html")
    assert done.status == 2
    assert "are the same file" in done.err
    spec = tmp_path / "mine.html"
    spec.write_text("extends: h100-sxm\nname: mine\n")
    done = run("-m", "llama3-8b", "-H", spec, "--html", spec)
    assert done.status == 2
    assert "is read by this very command" in done.err
    done = run("estimate", "-m", "llama3-8b", "--placement-svg", "a.svg", "--csv", "a.svg")
    assert "are the same file" in done.err
    done = run("estimate", "--points", "p.csv", "--placement-svg", "a.svg")
    assert "--placement-svg draws one plan" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]


@pytest.mark.parametrize("command", ["rank", "explain", "estimate"])
def test_every_chip_has_its_name_in_the_picture_of_a_placement(command: str, tmp_path: Path) -> None:
    target = tmp_path / "a.svg"
    words = {
        "rank": ("-m", "llama3-70b", "--tp", "4", "--pp", "3"),
        "explain": ("explain", "-m", "llama3-70b", "--plan", "TP4xPP3xDP2"),
        "estimate": ("estimate", "-m", "llama3-70b", "--plan", "TP4xPP3xDP2"),
    }[command]
    assert run(*words, "--gpus", "32", "--quiet", "--placement-svg", target).status == 0
    root = ElementTree.parse(target).getroot()
    space = "{http://www.w3.org/2000/svg}"
    found = ["".join(node.itertext()) for node in root.iter(f"{space}text")]
    names = [f"{copy}{stage}.{rank}" for copy in "AB" for stage in range(3) for rank in range(4)]
    assert [name for name in found if re.fullmatch(r"[A-Z]+\d+\.\d+", name)] == names
    assert found.count("idle") == 32 - 24 + 1  # and in the legend
    assert any("Boundaries between stages: 2 over nvlink, 2 over infiniband" in text for text in found)
    bands = [node.get("fill") for node in root.iter(f"{space}rect")]
    for shade in (*SHADES[0], *SHADES[1]):
        assert bands.count(shade) >= 2  # in the picture and in the legend
    assert SHADES[2][0] not in bands


def test_of_very_many_chips_the_middle_is_left_out_and_counted() -> None:
    machine, _ = load_machine("h100", None)
    text = seating_file(Placement.of(machine, 8 * 300), Plan.parse("TP8xDP300"))
    assert "... 172 more lines like these ..." in text
    assert "node 299" in text
    assert "node 200" not in text.replace("node 2000", "")
    assert len(text) < 400_000
