"""Elements: text stays text, numbers are short, tables are whole."""

import pytest

from bitdial.errors import ConfigError
from bitdial.report.markup import element, items, table, to_html, unfolding

EVIL = '</b><script>alert("1")</script>&amp;\'"'
ESCAPED = '&lt;/b&gt;&lt;script&gt;alert("1")&lt;/script&gt;&amp;amp;\'"'


def test_text_and_attributes_are_escaped() -> None:
    assert to_html(element("p", EVIL)) == f"<p>{ESCAPED}</p>"
    assert to_html(element("p", element("b"), EVIL)) == f"<p><b></b>{ESCAPED}</p>"
    assert to_html(element("p", aria_label='"&')) == '<p aria-label="&quot;&amp;"></p>'


def test_children_keep_their_order_and_attributes_their_names() -> None:
    made = element("p", "a", element("i", "b"), "c", None, "d", class_="x", aria_label="y", for_=None, hidden=True)
    assert to_html(made) == '<p class="x" aria-label="y" hidden="">a<i>b</i>cd</p>'
    assert to_html(element("rect", x=1.50, y=2.0, width=3, rx=False)) == '<rect x="1.5" y="2" width="3"></rect>'


def test_a_number_keeps_its_sign_on_its_line_except_in_scripts() -> None:
    assert to_html(element("p", "5 %")) == "<p>5\u00a0%</p>"
    assert to_html(element("script", '"5 %" < 6')) == '<script>"5 %" < 6</script>'


def test_tables_have_heads_for_columns_and_rows_and_scroll_in_themselves() -> None:
    text = to_html(table("Name", [("a", "b"), ("c", EVIL)]))
    assert '<div class="wide" role="region" aria-label="Name" tabindex="0">' in text
    assert '<th scope="col">a</th><th scope="col">b</th>' in text
    assert f'<th scope="row">c</th><td>{ESCAPED}</td>' in text
    assert "<caption>Name</caption>" in text
    with pytest.raises(ConfigError, match="'Name' differ in length; each needs 2 cells"):
        table("Name", [("a", "b"), ("c",)])


def test_lists_and_what_unfolds() -> None:
    assert to_html(items(["a", "<"])) == "<ul><li>a</li><li>&lt;</li></ul>"
    assert to_html(unfolding("More", element("p"))) == "<details><summary>More</summary><p></p></details>"
