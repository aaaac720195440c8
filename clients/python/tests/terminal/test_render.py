"""Output on terminals of several widths, and without a terminal."""

import io

import fakes
import pytest
from rich.cells import cell_len
from rich.console import Console
from screens import WIDTHS, Screen

from tandem._proto.rollout.v1.rollout_pb2 import FinishedEvent, GenerateResponse, TokensEvent
from tandem._proto.types.v1.trajectory_pb2 import Trajectory
from tandem.models.tokenizer import TextCodec
from tandem.terminal.output import Output, ResponsePrinter, authored_text
from tandem.terminal.steps import StepDisplay

SERVERS = [
    {
        "role": role,
        "address": f"127.0.0.1:4{port}123",
        "health": "SERVING",
        "version": 12,
        "model": "/srv/some-place/models/SmolLM2-135M-Instruct",
        "parameters": 134515008,
        "digest": "0123456789abcdef0123456789abcdef",
        "uptime_seconds": 123456.7,
        "software": "0.1.0",
    }
    for port, role in enumerate(("rollout", "trainer"))
] + [{"role": "critic", "address": "127.0.0.1:7703", "health": "UNREACHABLE"}]


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_fit_and_no_address_is_broken(width):
    screen = Screen(width)
    screen.output.result({}, screen.output.rows(SERVERS, counts=("parameters",)))
    assert max(map(cell_len, screen.lines)) <= width
    text = "\n".join(screen.lines)
    for server in SERVERS:
        for key in ("address", "health", "role"):
            assert server[key] in text
    assert "134,515,008" in text
    assert "123456.7" in text
    assert SERVERS[0]["model"] in text


def test_rows_are_a_table_where_it_fits_and_a_list_where_not():
    rows = [{"name": "trainer", "address": "127.0.0.1:7702"}, {"name": "critic"}]
    narrow, wide = Screen(24), Screen(80)
    for screen in (narrow, wide):
        screen.output.result({}, screen.output.rows(rows))
    assert narrow.lines == ["name     trainer", "address  127.0.0.1:7702", "name  critic"]
    assert "│" in wide.lines[3]


def test_a_problem_of_a_list_goes_on_below_its_text():
    screen = Screen(40)
    screen.output.note("2 problems:\n  - steps: " + "word " * 12 + "\n  - /" + "path/" * 7)
    assert screen.lines == [
        "2 problems:",
        "  - steps: word word word word word word",
        "    word word word word word word",
        "  - /" + "path/" * 7,
    ]


def test_sentences_wrap_where_names_do_not():
    screen = Screen(60)
    sentence = "it does not answer because of many different reasons"
    rows = [{"address": "127.0.0.1:7702", "problem": sentence}]
    screen.output.result({}, screen.output.rows(rows))
    assert "│ 127.0.0.1:7702 │ it does not answer" in "\n".join(screen.lines)
    assert max(map(cell_len, screen.lines)) <= 60


def test_rows_are_key_value_lines_without_a_terminal():
    screen = Screen(60, terminal=False)
    screen.output.result({}, screen.output.rows(SERVERS, counts=("parameters",)))
    assert len(screen.lines) == 3
    assert "parameters=134515008" in screen.lines[0]


STEP = {
    "step": 4321,
    "time_seconds": 123456.0,
    "reward/mean": -1234.5,
    "reward/frac_zero_std": 0.25,
    "loss/total": -123456.789,
    "policy/grad_norm": 123456789.0,
    "policy/entropy": 1.25,
    "policy/learning_rate": 1e-6,
    "mismatch/k3": 1.2e-5,
    "tandem/senior_token_fraction": 0.5,
    "tandem/switches_per_seq": 12.5,
    "tokens/response": 1234567890,
    "response/truncated_fraction": 1.0,
    "time/generate_seconds": 12345.6,
    "time/reward_seconds": 0.0,
    "time/train_seconds": 12345.6,
    "time/publish_seconds": 1.5,
}


# Columns by width: the most important ones are always shown, the others where there is room.
HEADERS = {
    60: "step reward loss grad senior generate left",
    80: "step reward loss grad rate senior generate train left",
    120: "step reward flat loss grad rate senior switches tokens tok/s generate train publish left",
    200: "step reward flat loss grad rate entropy mismatch senior switches tokens tok/s cut"
    " generate judge train publish left",
}


@pytest.mark.parametrize("width", WIDTHS)
def test_step_lines_fit_their_terminal(width):
    screen = Screen(width)
    small = STEP | {"loss/total": -0.1, "tokens/response": 512, "reward/mean": 0.5}
    with StepDisplay(screen.output, 1, 5000) as display:
        display.step(small | {"step": 1, "policy/grad_norm": 0.5})
    header, values = (next(i for i in screen.lines if word in i) for word in (" reward ", "0.500"))
    assert cell_len(header) <= width
    assert cell_len(values) <= width
    assert len(header.split()) == len(values.split())
    assert header.split() == HEADERS[width].split()
    assert max(map(cell_len, screen.lines)) <= width


def test_large_numbers_do_not_touch():
    screen = Screen(200)
    with StepDisplay(screen.output, 1, 5000) as display:
        display.step(STEP)
    [header] = [line for line in screen.lines if " reward " in line]
    [values] = [line for line in screen.lines if "4321 " in line and "-1234.5" in line]
    assert len(values.split()) == len(header.split())
    assert "1,234,567,890" in values.split()


def test_steps_of_a_speculator_show_its_loss_on_every_terminal():
    for width in (60, 200):
        screen = Screen(width)
        with StepDisplay(screen.output, 1, 5000) as display:
            display.step(STEP | {"speculator/loss": 7.654})
        header, values = (
            next(i for i in screen.lines if word in i) for word in (" heads ", "7.654")
        )
        assert values.split().index("7.654") == header.split().index("heads")


def test_a_header_follows_a_terminal_that_changes_its_width():
    screen = Screen(200)
    with StepDisplay(screen.output, 1, 5000) as display:
        display.step(STEP)
        screen.console.width = 60
        display.step(STEP | {"step": 4322})
    assert sum(" reward " in line for line in screen.lines) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_notes_break_between_words_and_never_in_a_path(width):
    screen = Screen(width)
    path = "/very/long/" + "folder/" * 20 + "run.yaml"
    with StepDisplay(screen.output, 1, 4) as display:
        screen.output.note(f"{display.waiting()}\nrun directory: {path}")
    words = [word for line in screen.lines for word in line.split()]
    assert path in words
    for phrase in display.waiting().split():
        assert phrase in words
    assert all(cell_len(line) <= width for line in screen.lines if path not in line)


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


def test_a_table_is_tab_separated_lines_without_a_terminal():
    screens = Screen(60), Screen(60, terminal=False)
    for screen in screens:
        rows = [("before training", "15.0%"), ("gain", "+53.0%")]
        screen.output.result({}, screen.output.table("Answers", ("", "accuracy"), rows))
    assert "│ gain            │   +53.0% │" in screens[0].lines
    assert screens[1].lines == ["Answers", "\taccuracy", "before training\t15.0%", "gain\t+53.0%"]


def tokens(sample, offset, ids, mask):
    return GenerateResponse(
        tokens=TokensEvent(
            request_id="p",
            sample_index=sample,
            offset=offset,
            token_ids=ids,
            authorship_mask=bytes(mask),
        )
    )


def finished(sample, ids, mask):
    trajectory = Trajectory(
        response_token_ids=ids, authorship_mask=bytes(mask), sample_index=sample
    )
    return GenerateResponse(finished=FinishedEvent(request_id="p", trajectory=trajectory))


def test_responses_are_printed_as_they_grow_and_in_their_order(codec):
    screen = Screen(80)
    printer = ResponsePrinter(screen.console, codec, {("p", 0): "one", ("p", 1): "two"})
    printer.on_event(tokens(1, 0, [8, 9], [1, 1]))
    assert screen.lines == ["--- one ---"]
    printer.on_event(tokens(0, 0, [2, 3], [1, 0]))
    assert screen.lines == ["--- one ---", "w2[w3"]
    # After a broken connection the same tokens come again.
    printer.on_event(tokens(0, 0, [2, 3, 4], [1, 0, 0]))
    assert screen.lines == ["--- one ---", "w2[w3w4"]
    printer.on_event(finished(1, [8, 9], [1, 1]))
    printer.on_event(finished(0, [2, 3, 4, 5], [1, 0, 0, 0]))
    assert screen.lines == ["--- one ---", "w2[w3w4w5]", "--- two ---", "w8w9"]


def test_a_continued_response_is_printed_from_where_it_goes_on(codec):
    screen = Screen(80)
    printer = ResponsePrinter(screen.console, codec, {("p", 0): "one"})
    printer.on_event(tokens(0, 7, [2, 3], [1, 0]))
    turn = finished(0, [2, 3, 4], [1, 0, 0])
    turn.finished.trajectory.response_offset = 7
    printer.on_event(turn)
    assert screen.lines == ["--- one ---", "w2[w3w4]"]


def test_what_an_environment_said_has_marks_and_a_colour_of_its_own():
    text = authored_text(["a", "b", "c", "d", "e"], [1, 2, 2, 0, 2])
    assert text.plain == "a«bc»[d]«e»"
    assert "green" in {str(span.style) for span in text.spans}


def test_a_single_response_has_a_head_too(codec):
    screen = Screen(80)
    ResponsePrinter(screen.console, codec, {("p", 0): "one"}).on_event(finished(0, [2], [1]))
    assert screen.lines == ["--- one ---", "w2"]


def test_authors_differ_in_brackets_as_well_as_in_colour():
    text = authored_text(["4 +", " 3", " =", " 7"], [1, 0, 0, 1])
    assert text.plain == "4 +[ 3 =] 7"
    assert {str(span.style) for span in text.spans} >= {"bold cyan", "underline yellow"}


@pytest.mark.parametrize(
    ("authors", "drafts", "shown"),
    [
        ([1, 1, 1], [0, 1, 1], "a‹bc›"),
        ([1, 0, 0], [1, 1, 0], "‹a›[‹b›c]"),
        ([0, 0, 1], [1, 1, 1], "[‹ab›]‹c›"),
    ],
)
def test_accepted_drafts_have_marks_of_their_own(authors, drafts, shown):
    text = authored_text(["a", "b", "c"], authors, drafts=drafts)
    assert text.plain == shown
    assert any("reverse" in str(span.style) for span in text.spans)


def test_bytes_of_a_character_show_with_the_token_that_completes_it():
    assert authored_text(["a", "", "é"], [1, 0, 1]).plain == "aé"


def test_control_characters_are_shown_and_not_obeyed():
    assert authored_text(["a\x1b[2J", "b\n"], [1, 1]).plain == "a\\x1b[2Jb\n"
    assert authored_text(["b\n"], [1], keep="").plain == "b\\n"


def test_markup_in_text_is_printed_as_it_is(capsys):
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
    legend, header, values = file.getvalue().splitlines()
    # The columns that this run has, no others.
    assert header.split() == ["step", "reward", "generate", "train", "left"]
    assert legend.startswith("reward: mean reward; generate: seconds for generation; train: ")
    assert "0.500" in values
    assert "6s" in values
    assert "train 75%" in display.waiting()
    assert "reference" not in display.waiting()
    display.step(line | {"step": 2, "time/reference_seconds": 2.0})
    assert "reference 22% (the trainer waits), train 67%" in display.waiting()


def test_steps_of_an_asynchronous_run_show_staleness_and_idle_shares():
    file = io.StringIO()
    output = Output(console=Console(file=file, width=300))
    idle = {"idle/rollout": 0.5, "idle/trainer": 0.0, "staleness/mean": 1.0}
    seconds = {"time/generate_seconds": 9.0, "time/train_seconds": 3.0, "time/wait_seconds": 1.0}
    with StepDisplay(output, 1, 4) as display:
        display.step({"step": 1, "time_seconds": 2.0} | idle | seconds)
        # A short step counts for less.
        display.step({"step": 2, "time_seconds": 2.5} | idle | seconds | {"idle/trainer": 1.0})
    header, values = file.getvalue().splitlines()[1:3]
    shown = dict(zip(header.split(), values.split(), strict=True))
    assert (shown["stale"], shown["r.idle"], shown["t.idle"]) == ("1.0", "50%", "0%")
    assert "c.idle" not in shown
    # Rollouts that are drawn while a step trains do not count as its own.
    assert display.waiting() == (
        "wait 25% (the trainer waits for rollouts), train 75%, publish 0% (both wait); "
        "idle: rollout 50%, trainer 20%"
    )


def test_steps_of_an_asynchronous_run_with_a_critic_show_its_idle_share_too():
    file = io.StringIO()
    line = {"step": 1, "time_seconds": 2.0, "time/wait_seconds": 1.0, "time/train_seconds": 1.0}
    idle = {"idle/rollout": 0.5, "idle/trainer": 0.25, "idle/critic": 0.75}
    with StepDisplay(Output(console=Console(file=file, width=300)), 1, 4) as display:
        display.step(line | idle)
    header, values = file.getvalue().splitlines()[1:3]
    assert dict(zip(header.split(), values.split(), strict=True))["c.idle"] == "75%"
    assert display.waiting().endswith("idle: rollout 50%, trainer 25%, critic 75%")


def test_the_rate_of_a_resumed_run_is_of_its_own_steps():
    file = io.StringIO()
    with StepDisplay(Output(console=Console(file=file, width=300)), 3, 6, 100.0) as display:
        display.step({"step": 3, "time_seconds": 102.0})
    assert file.getvalue().splitlines()[-1].split()[-1] == "6s"
