"""The site of the documents is built without a warning."""

import re

import pytest

from tests import site

WINGS = ("docs", "orchestrator/gangway.py")

pytestmark = pytest.mark.slow("builds the whole site")


@pytest.fixture(scope="module", autouse=True)
def tool():
    if not site.TOOL.is_dir():
        pytest.skip("the tool that builds the site is not installed: `make build/zensical`")


def test_the_site_is_built_without_a_warning_and_has_a_page_for_each_document(tmp_path):
    built = site.build(tmp_path / "work")
    documents = {path.stem for path in site.DOCS.glob("*.md")} | {"contributing", "changelog"}
    assert {path.stem for path in built.glob("*.html")} == documents | {"404"}
    assert (built / "search.json").stat().st_size > 100_000
    assert not any(re.search(r'(src|stylesheet"[^>]* href)="https?://', path.read_text()) for path in built.glob("*.html")), (
        "offline"
    )


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "linked", lambda path: "# Page\n\nTo [another](nowhere.md), and to [a part](#nowhere) of this.\n")
    with pytest.raises(site.SiteError, match=r"(?s)page does not exist.*anchor does not exist"):
        site.build(tmp_path / "work")
