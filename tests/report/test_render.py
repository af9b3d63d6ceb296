"""The report as text, JSON, Markdown and HTML."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fusedcuda.report.diff import diff
from fusedcuda.report.result import Report

NAME = "<b>two & layers</b>"
VOID = {"meta", "br", "link", "img", "input", "hr"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class StrictParser(HTMLParser):
    """Every tag closed by its own, nothing fetched; keeps the visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "onclick", "srcset"), (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"<{tag}/> in HTML")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


@pytest.fixture(scope="module")
def page(predicted: Report) -> str:
    return predicted.to_html()


@pytest.fixture(scope="module")
def parsed(page: str) -> StrictParser:
    parser = StrictParser()
    parser.feed(page)
    parser.close()
    return parser


def test_html_is_whole_and_self_contained(page, parsed):
    assert page.startswith("<!DOCTYPE html>")
    assert parsed.open == []
    assert not re.search(r"(https?:)?//(?!.*explain)[a-z]+\.", page)
    assert "@import" not in page
    assert "url(" not in page


def test_html_escapes_what_comes_from_the_model(page, parsed):
    assert NAME in "".join(parsed.text)
    assert NAME not in page
    assert "b" not in parsed.seen[: parsed.seen.index("h1") + 2]
    assert "&lt;between &amp; &#39;graphs&#39;&gt;" in page


def test_html_has_a_row_for_each_kernel_and_a_bar_for_each_launch(predicted, page):
    assert page.count("<tr data-kernel=") == len(predicted.kernels)
    assert page.count("<rect ") == len(predicted.timeline)


def test_json_comes_back_as_it_was(predicted, tmp_path):
    data = json.loads(predicted.save(tmp_path / "report.json").read_text())
    assert data["schema"] == 1
    assert Report.from_dict(data) == predicted
    with pytest.raises(ValueError, match="expected schema 1, found 2"):
        Report.from_dict(data | {"schema": 2})


def test_markdown_tables_have_as_many_cells_in_every_row(predicted, tmp_path):
    text = predicted.save(tmp_path / "report.md").read_text()
    assert r"\<b\>two & layers\</b\>" in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 4  # side by side, kernels, breaks, what to use
    for table in tables:
        cells = {len(re.split(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(cells) == 1, table


def test_text_says_the_verdict_and_every_section(predicted):
    text = str(predicted)
    assert predicted.verdict in text
    assert f"{NAME}: forward, mode default, predicted for NVIDIA H200" in text
    for title in (
        "Side by side", "Kernels in launch order", "Where fusion broke", "What to use",
        "When not to fuse", "Graph breaks and CUDA graphs", "How these numbers were made",
    ):  # fmt: skip
        assert f"\n{title}\n" in text


def test_bytes_by_ncu_are_told_apart_from_those_of_the_model(predicted):
    counted = replace(predicted, bytes_measured=123_000_000)
    assert "by ncu: 123 MB" in str(counted)
    assert "ncu counts 123 MB" in counted.to_html()
    assert "ncu" not in str(predicted)


def test_diff_names_numbers_and_kernels(predicted):
    assert "Nothing changed." in diff(predicted, predicted)
    fewer = replace(predicted, kernels=predicted.kernels[1:], graph_breaks=[], mode="max-autotune")
    text = diff(predicted, fewer)
    gone = predicted.kernels[0]
    assert f"- 1 x matmul: {', '.join(gone.ops)}" in text
    assert re.search(r"^  breaks +1 +0 +-100\.0%$", text, re.MULTILINE)
    assert "not the same mode: default before, max-autotune now" in text


# ---- In a browser --------------------------------------------------------------------------------

# Sorts by time twice and reports what the table looks like, in the title.
SCRIPT = """
<script>
const times = () => [...document.querySelectorAll("#kernels tbody tr")]
  .map((row) => Number(row.cells[5].dataset.value));
const button = document.querySelectorAll("#kernels th button")[5];
button.click();
const up = times();
button.click();
const down = times();
const wide = document.documentElement.scrollWidth > window.innerWidth;
document.body.insertAdjacentHTML("beforeend", "<pre id='seen'></pre>");
document.getElementById("seen").textContent = JSON.stringify({
  up, down, wide, sort: button.parentElement.getAttribute("aria-sort"),
  bars: [...document.querySelectorAll("#timeline rect")]
    .map((bar) => bar.getBoundingClientRect().width),
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium here")
    return found


def test_in_a_browser_it_sorts_and_fits(browser, page, predicted, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", f"{SCRIPT}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    run = subprocess.run(
        [browser, *options, profile, "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    match = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout)
    assert match, run.stderr[-2000:]
    seen = json.loads(match[1])
    expected = sorted(kernel.us for kernel in predicted.kernels)
    assert seen["up"] == expected
    assert seen["down"] == expected[::-1]
    assert seen["sort"] == "descending"
    assert not seen["wide"]
    assert all(width > 0.5 for width in seen["bars"])


@pytest.mark.parametrize("name", ["llama", "lora", "dlrm"])
def test_the_examples_in_the_repository_say_that_they_are_predicted(name):
    folder = Path(__file__).parents[2] / "docs" / "reports"
    assert "predicted for NVIDIA H200" in (folder / f"{name}.md").read_text()
    page = (folder / f"{name}.html").read_text()
    assert '<span class="tag">predicted</span>' in page
    StrictParser().feed(page)
