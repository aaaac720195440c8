"""What people see."""

import io

from rich.console import Console

from tandem.render import Output, StepDisplay, authored_text


def test_authors_differ_in_brackets_as_well_as_in_colour():
    text = authored_text(["4 +", " 3", " =", " 7"], [1, 0, 0, 1])
    assert text.plain == "4 +[ 3 =] 7"
    assert {str(span.style) for span in text.spans} >= {"bold cyan", "underline yellow"}


def test_control_characters_are_shown_and_not_obeyed():
    assert authored_text(["a\x1b[2J", "b\n"], [1, 1]).plain == "a\\x1b[2Jb\n"
    assert authored_text(["b\n"], [1], one_line=True).plain == "b\\n"


def test_text_stays_as_it_is(capsys):
    Output().note("3 [junior] :key:")
    Output().result({}, "4 [senior] :key:")
    Output(as_json=True).note("5 :key:")
    printed = capsys.readouterr()
    assert printed.out == "3 [junior] :key:\n4 [senior] :key:\n"
    assert printed.err == "5 :key:\n"


def test_steps_are_plain_lines_without_a_terminal():
    file = io.StringIO()
    output = Output(console=Console(file=file, width=300))
    line = {"step": 1, "time_seconds": 2.0, "reward/mean": 0.5, "time/train_seconds": 3.0}
    with StepDisplay(output, 1, 4) as display:
        display.step(line | {"time/generate_seconds": 1.0, "policy/grad_norm": None})
    header, values = file.getvalue().splitlines()
    assert "reward" in header
    assert "0.500" in values
    assert "6s" in values
    assert "train 75%" in display.waiting()


def test_the_rate_of_a_resumed_run_is_of_its_own_steps():
    file = io.StringIO()
    with StepDisplay(Output(console=Console(file=file, width=300)), 3, 6, 100.0) as display:
        display.step({"step": 3, "time_seconds": 102.0})
    assert file.getvalue().splitlines()[1].split()[-1] == "6s"
