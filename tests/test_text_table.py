from varprop.text_table import Table

TABLE = Table("Times", ("name", "ms", "note"), [("none", "1.5", ""), ("analytic", "12.25", "")], left=("name", "note"))


def test_columns_are_aligned_to_the_side_asked_for():
    assert TABLE.plain() == "Times\nname         ms  note\nnone        1.5\nanalytic  12.25"


def test_without_a_heading_the_columns_come_first():
    assert Table("", ("a",), [("1",)]).plain() == "a\n1"


def test_columns_that_no_row_fills_can_be_left_out():
    assert TABLE.without_empty_columns().columns == ["name", "ms"]


def test_markdown_tells_the_sides():
    assert TABLE.without_empty_columns().markdown().splitlines()[:2] == ["| name | ms |", "| --- | ---: |"]
