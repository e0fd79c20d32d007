from qnmixer.reports.tables import csv_table, markdown_table


def test_csv_quotes_what_needs_it() -> None:
    assert csv_table([["a", "b"], [1, "x,y"], [None, 'say "it"']]) == 'a,b\n1,"x,y"\n,"say ""it"""\n'


def test_markdown_escapes_bars() -> None:
    assert markdown_table(["a", "b"], [["1", "x|y"]]) == "| a | b |\n|---|---|\n| 1 | x\\|y |"
