"""The pages in docs/case_studies are what the scripts write from the CSV beside them."""

from functools import partial

import pytest
from scripted_gpu import ROOT

from examples import fusion_arithmetic, fusion_page, graph_breaks
from examples.dlrm import page as dlrm_page
from examples.results import Results, read

FOLDER = ROOT / "docs" / "case_studies"
TEXTS = [expression.text for expression in fusion_arithmetic.EXPRESSIONS]
PAGES = {
    "dlrm": dlrm_page.markdown,
    "fusion_arithmetic": partial(fusion_page.markdown, TEXTS, fusion_arithmetic.SIZES),
    "graph_breaks": graph_breaks.markdown,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_made_from_the_numbers_beside_it(name):
    results = Results(read(FOLDER / f"{name}.csv"))
    text = (FOLDER / f"{name}.md").read_text()
    shown = [path.name for path in FOLDER.glob(f"{name}_*.png") if path.name in text]
    order = sorted(shown, key=text.index)
    assert PAGES[name](results, order) == text


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_every_picture_and_the_overview_names_it(name):
    text = (FOLDER / f"{name}.md").read_text()
    for path in FOLDER.glob(f"{name}_*.png"):
        assert f"({path.name})" in text
    assert f"({name}.md)" in (FOLDER / "README.md").read_text()
